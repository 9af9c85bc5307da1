"""`outrigger bundle push` and `verify` as they are typed, to a folder; and to a phone that a small program plays.

The program takes the command line that pymobiledevice3 11 documents (apps push|pull APP FROM TO --documents) and keeps
the files in a folder; it shows that our side says the right words and checks what comes back, and nothing of a device.
"""

import sys

import pytest
from click.testing import CliRunner

from common.errors import PackageError, ServiceError, SettingError
from device.coreml.convert.delivery import contents
from device.coreml.convert.manifest import Manifest, file_records
from services.cli.bundle import command
from services.cli.phone_files import PhoneFiles

PHONE = """
import pathlib, shutil, sys
root, (apps, verb, app, source, target, documents) = pathlib.Path(sys.argv[1]), sys.argv[2:]
assert (apps, app, documents) == ("apps", "org.example.chat", "--documents"), sys.argv
inside = lambda name: root / name.lstrip("/")
if verb == "pull":
    if not inside(source).exists():
        sys.exit("file not found: " + source)
    shutil.copy(inside(source), target)
elif pathlib.Path(source).is_dir():
    shutil.copytree(source, inside(target), dirs_exist_ok=True)
elif (root / "full").exists() and source.endswith(".bin"):
    inside(target).touch()
else:
    shutil.copy(source, inside(target))
"""


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "weight.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "meta.yaml").write_text("model_info:\n")
    manifest = Manifest({}, {})
    manifest.others = file_records(folder, [folder / "meta.yaml", folder / "weights"])
    manifest.write(folder)
    return folder


@pytest.fixture
def phone(tmp_path):
    root = tmp_path / "phone"
    (root / "Documents").mkdir(parents=True)
    return root, PhoneFiles("org.example.chat", (sys.executable, "-c", PHONE, str(root)))


def run(*arguments, code=0):
    done = CliRunner().invoke(command, [str(each) for each in arguments])
    assert done.exit_code == code, done.output or done.exception
    return done.stdout


def test_to_a_folder(bundle, tmp_path):
    text = run("push", bundle, tmp_path / "disk")
    assert "3 files copied" in text and "sizes and hashes are right" in text
    assert "0 files copied (0.0 MB), 3 were there" in run("push", bundle, tmp_path / "disk")
    assert "3 of 3 files are right" in run("verify", tmp_path / "disk")
    (tmp_path / "disk" / "weights" / "weight.bin").write_bytes(b"")
    text = run("verify", tmp_path / "disk", code=1)
    assert "wrong    weights/weight.bin is empty" in text and "2 of 3" in text


def test_one_goal_is_given(bundle, tmp_path):
    for goals in ((), (tmp_path / "disk", "--device", "org.example.chat")):
        done = CliRunner().invoke(command, ["push", str(bundle), *map(str, goals)])
        assert isinstance(done.exception, SettingError) and "one of them" in str(done.exception)


def test_to_a_phone(bundle, phone):
    root, files = phone
    told, wanted = [], contents(bundle)
    done = files.push(bundle, "gemma", wanted, lambda name, size: told.append(name))
    assert sorted(told) == sorted(wanted) and done.n_copied == 3
    assert (root / "Documents/gemma/weights/weight.bin").read_bytes() == bytes(range(256)) * 40
    (root / "Documents/gemma/meta.yaml").write_text("other")
    assert list(files.wrong("gemma", wanted)) == ["meta.yaml"]
    assert files.push(bundle, "gemma", wanted, lambda name, size: None).n_copied == 1


def test_an_empty_arrival_on_a_phone_is_an_error(bundle, phone):
    root, files = phone
    (root / "full").touch()
    with pytest.raises(PackageError, match=r"weight\.bin has 0 bytes, not 10240 after it was pushed"):
        files.push(bundle, "gemma", contents(bundle), lambda name, size: None)


def test_a_program_that_fails_is_quoted(bundle):
    files = PhoneFiles("org.example.chat", (sys.executable, "-c", "import sys; sys.exit('no device')"))
    with pytest.raises(ServiceError, match="exit code 1: no device"):
        files.push(bundle, "gemma", contents(bundle), lambda name, size: None)
