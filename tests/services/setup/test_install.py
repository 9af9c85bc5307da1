"""Aim: a set-up does what is missing and nothing else, goes on where it stopped, and two of them take turns.

Method: the real plan on an empty folder with a virtual environment made by Python itself; the stamp is written by hand
where a long step (compiling, packages) would have written it. Nothing here uses the network.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from services.setup import checks, install, model, processor, steps, wheel
from services.setup.install import Place, Plan

ABSENT = processor.AmxVerdict("absent", ())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An empty checkout; no folder of shared wheels."""
    monkeypatch.delenv(wheel.EXTRA_FOLDER_VARIABLE, raising=False)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".outrigger").mkdir()
    return Place(tmp_path)


def finished(place: Place) -> Plan:
    """A plan that finds everything there, as a finished set-up leaves it."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place.checkout / ".venv")], check=True, timeout=60
    )
    library = next((place.checkout / ".venv" / "lib").iterdir()) / "site-packages"
    (library / "pip").mkdir()
    keep_wheel(place.state / "wheels", wheel.recipe(ABSENT).key)
    (place.state / "models").mkdir(exist_ok=True)
    with (place.state / "models" / model.SMOLLM2.file).open("wb") as file:
        file.truncate(model.SMOLLM2.n_bytes)  # sparse: a length without content
    plan = Plan(place, {"test"})
    place.stamp.write_text(json.dumps(plan.wanted))
    return Plan(place, {"test"})


def keep_wheel(folder: Path, key: str) -> Path:
    path = folder / key / "llama_cpp_python-0.3.36-py3-none-any.whl"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llama_cpp/__init__.py", "")
    return path


@pytest.fixture(autouse=True)
def _no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "amx_verdict", lambda state: ABSENT)


def test_an_empty_checkout_lacks_everything_in_this_order(place: Place) -> None:
    assert Plan(place, {"test"}).missing() == ["venv", "compile", "wheel", "packages", "model smollm2-135m"]


def test_a_finished_set_up_has_nothing_to_do(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert finished(place).missing() == []
    assert install.set_up(["--quiet"], place.checkout) == 0
    assert capsys.readouterr().err == ""
    assert install.set_up([], place.checkout) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_a_changed_input_redoes_only_what_depends_on_it(place: Place) -> None:
    finished(place)
    (place.checkout / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert Plan(place, {"test"}).missing() == ["packages"]
    assert Plan(place, {"test", "dev"}).wanted["extras"] == ["dev", "test"]


def test_an_extra_once_asked_for_stays(place: Place) -> None:
    plan = finished(place)
    plan.wanted["extras"] = ["dev", "test"]
    plan._stamp("extras")
    assert Plan(place, {"test"}).missing() == []


def test_a_lost_model_is_fetched_again(place: Place) -> None:
    finished(place)
    (place.state / "models" / model.SMOLLM2.file).unlink()
    assert Plan(place, {"test"}).missing() == ["model smollm2-135m"]


def test_another_processor_compiles_again_and_keeps_the_old_wheel(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = finished(place)
    monkeypatch.setattr(processor, "identity", lambda: "another processor")
    assert Plan(place, {"test"}).missing() == ["compile", "wheel"]
    assert wheel.kept(plan.recipe.key, place.state) is not None


def test_a_virtual_environment_that_does_not_start_is_made_again(place: Place) -> None:
    finished(place)
    place.python.unlink()
    place.python.symlink_to("/nonexistent/python")
    assert Plan(place, {"test"}).missing() == ["venv", "wheel", "packages", "model smollm2-135m"]


def test_an_environment_behind_a_link_is_another_checkouts_and_is_never_emptied(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    theirs = tmp_path_factory.mktemp("theirs")
    (theirs / "precious").touch()
    (place.checkout / ".venv").symlink_to(theirs)
    with pytest.raises(checks.SetupError, match="is a link"):
        Plan(place, {"test"})._do_venv(steps.Progress(1))
    assert (theirs / "precious").exists()


def test_a_moved_checkout_is_set_up_again(place: Place) -> None:
    finished(place)
    stamp = json.loads(place.stamp.read_text())
    place.stamp.write_text(json.dumps({**stamp, "venv": "Python 3.11 in /somewhere/else"}))
    assert Plan(place, {"test"}).missing()[0] == "venv"


def test_steps_are_stamped_one_by_one(place: Place) -> None:
    plan = finished(place)
    place.stamp.unlink()
    plan = Plan(place, {"test"})
    plan._stamp("venv")
    plan._stamp("wheel")
    assert Plan(place, {"test"}).missing() == ["packages", "model smollm2-135m"]


def test_a_wheel_kept_elsewhere_is_found_and_a_broken_one_is_not(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = wheel.recipe(ABSENT).key
    monkeypatch.setenv(wheel.EXTRA_FOLDER_VARIABLE, str(tmp_path / "shared"))
    assert wheel.kept(key, place.state) is None
    path = keep_wheel(tmp_path / "shared", key)
    assert wheel.kept(key, place.state) == path
    path.write_bytes(path.read_bytes()[:40])
    assert wheel.kept(key, place.state) is None


def test_a_fresh_wheel_is_shared_once_and_a_folder_that_refuses_it_stops_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keep_wheel(place.state / "wheels", "key")
    monkeypatch.setenv(wheel.EXTRA_FOLDER_VARIABLE, str(tmp_path / "shared"))
    for _ in range(2):
        wheel._share(path.parent, "key")
    assert [each.name for each in (tmp_path / "shared").iterdir()] == ["key"]
    assert wheel.kept("key", tmp_path / "nothing") == tmp_path / "shared" / "key" / path.name
    assert capsys.readouterr().err == ""

    monkeypatch.setenv(wheel.EXTRA_FOLDER_VARIABLE, str(path))  # a file where a folder is expected
    wheel._share(path.parent, "key")
    assert "could not be copied" in capsys.readouterr().err


def test_all_that_is_missing_is_told_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(checks, "DISK_BYTES_COMPILE", 1 << 60)
    with pytest.raises(checks.SetupError) as caught:
        checks.refuse(checks.problems(place.checkout, need_venv=True, need_compile=True))
    text = str(caught.value)
    assert "a C and a C++ compiler" in text
    assert "apt-get install gcc g++" in text
    assert "xcode-select --install" in text
    assert "room on the disk" in text


def test_no_compiler_is_needed_when_nothing_is_compiled(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert checks.problems(place.checkout, need_venv=False, need_compile=False) == []


def test_a_model_asked_for_is_fetched_beside_the_one_that_is_always_there(place: Place) -> None:
    finished(place)
    plan = Plan(place, {"test"}, ["gemma3-270m"])
    assert plan.missing() == ["model gemma3-270m"]
    assert Plan(place, {"test"}).missing() == []
    assert set_up_refuses(place, "gpt-5") == 2


def set_up_refuses(place: Place, name: str) -> int:
    """Exit code for a model that is not on the list."""
    with pytest.raises(SystemExit) as left:
        install.set_up(["--model", name], place.checkout)
    return int(left.value.code or 0)


def packed(folder: Path, members: dict[str, bytes]) -> None:
    """Wheels as pip would bring them: member path -> content; the package is the path's first word."""
    for path, content in members.items():
        with zipfile.ZipFile(folder / f"{path.split('/')[0]}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(path, content)


def in_parts(sha256: str) -> model.ShippedModel:
    """A model in two packages and its licence in a third."""
    parts = tuple(model.Member(f"the-{n}", "1.0", f"the_{n}/part") for n in ("one", "two"))
    licence = model.Member("the-licence", "1.0", "the_licence/TERMS.html")
    return model.ShippedModel("m", "M", "m.gguf", 6, sha256, parts, licence, "by somebody")


def test_a_model_is_joined_from_its_parts_with_its_licence_beside_it(place: Place, tmp_path: Path) -> None:
    packed(tmp_path, {"the_one/part": b"abc", "the_two/part": b"def", "the_licence/TERMS.html": b"terms"})
    joined = in_parts(hashlib.sha256(b"abcdef").hexdigest())
    model._assemble(joined, tmp_path, place.state)
    assert joined.is_there(place.state)
    assert {path.name: path.read_bytes() for path in joined.path(place.state).parent.iterdir()} == {
        "m.gguf": b"abcdef",
        "m.LICENSE.html": b"terms",
        "m.NOTICE.txt": f"m.gguf\n\nby somebody\nsha256 {joined.sha256}\n".encode(),
    }


def test_a_changed_or_missing_part_is_refused_and_leaves_no_file(place: Place, tmp_path: Path) -> None:
    packed(tmp_path, {"the_one/part": b"abc", "the_two/part": b"dex", "the_licence/TERMS.html": b"terms"})
    changed = in_parts(hashlib.sha256(b"abcdef").hexdigest())
    with pytest.raises(checks.SetupError, match=f"has sha256 .*, expected {changed.sha256}"):
        model._assemble(changed, tmp_path, place.state)
    packed(tmp_path, {"the_two/other": b"def"})
    with pytest.raises(checks.SetupError, match="is damaged or changed"):
        model._assemble(changed, tmp_path, place.state)
    (tmp_path / "the_two-1.0-py3-none-any.whl").unlink()
    with pytest.raises(checks.SetupError, match=r"pip brought no wheel of the-two 1\.0"):
        model._assemble(changed, tmp_path, place.state)
    assert list(changed.path(place.state).parent.iterdir()) == []


def test_a_second_set_up_waits_for_the_first(place: Place) -> None:
    lock = place.state / "lock"
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from services.setup.install import only_one
        with only_one(Path({str(lock)!r})):
            print("inside", flush=True)
        """
    )
    with install.only_one(lock):
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=install.CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr is not None
        assert "another one is at work here" in child.stderr.readline()
        assert child.poll() is None
    out, _ = child.communicate(timeout=60)
    assert out == "inside\n"


def test_what_pip_writes_stays_in_the_checkout(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = Plan(place, {"test"})._environment()
    assert Path(environment["PIP_CACHE_DIR"]).is_relative_to(place.state)
    assert Path(environment["TMPDIR"]).is_relative_to(place.state)
    assert "PYTHONPATH" not in environment


def test_a_failing_step_ends_in_a_sentence_and_not_in_a_trace(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(place)
    (place.checkout / "pyproject.toml").write_text("changed")
    monkeypatch.setattr(
        Plan, "_pip", lambda self, progress, *_: steps.run(["false"], progress, self.place.log)
    )
    assert install.set_up([], place.checkout) == 1
    told = capsys.readouterr().err
    assert "set-up failed: false failed with exit code 1" in told
    assert "Traceback" not in told
