"""`outrigger`: the command. Names the subcommands, shows versions, and turns our errors into one line and a code.

Exit codes: 0 done, 1 failed, 2 a bad setting or flag, 3 a process did not start. With --debug (or OUTRIGGER_DEBUG=1)
an error keeps its trace. Imports a subcommand only when it is called.
"""

from __future__ import annotations

import errno
import os
import sys

import click

from common.errors import OutriggerError, ServiceError, SettingError
from services.cli.lazy import LazyGroup

EXIT_FAILED, EXIT_SETTING, EXIT_NOT_STARTED = 1, 2, 3
EXIT_INTERRUPTED = 130
FILE_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG),
)
"""What a disk or its rights refuse is told in a sentence, without a trace."""

COMMANDS = {
    "run": ("services.cli.run:command", "Serve in the foreground: gateway, mac, bridge and a worker."),
    "up": ("services.cli.up:command", "Serve in the background, until `outrigger down`."),
    "down": ("services.cli.down:command", "Stop what runs."),
    "status": ("services.cli.status:command", "How each process is."),
    "top": ("services.cli.top:command", "Rates of reading, writing and the cable, as they are now."),
    "logs": ("services.cli.logs:command", "What the processes logged; -f follows."),
    "worker": ("services.cli.worker:command", "Serve the last layers of a model at the far end of a cable."),
    "split": ("services.cli.split:command", "Write a worker's tail file of a model."),
    "synth": ("services.cli.synth:command", "Write a synthetic model."),
    "models": ("services.cli.models:command", "Models that come with Outrigger: list them, fetch one."),
    "verify": ("services.cli.verify:command", "Compare answers with and without the worker."),
    "demo": (
        "services.cli.demo:command",
        "Read a long document alone and with a worker; cut the cable once.",
    ),
    "pages": (
        "services.cli.pages:command",
        "Page programs: build templates, look into packages, check pages.",
    ),
    "convert": ("services.cli.convert:command", "A Gemma 3 model as a Core ML bundle for a phone."),
    "bundle": ("services.cli.bundle:command", "Core ML bundles: what would go wrong on a device; proofs."),
    "device-check": (
        "services.cli.device_check:command",
        "What this device does with a page program, or a bundle, as one JSON.",
    ),
    "bench": ("services.cli.bench:command", "Measure the real processes."),
    "trace": ("services.cli.trace:command", "Where the time of a read went: table, picture or Chrome trace."),
    "doctor": ("services.cli.doctor:command", "Examine this machine, the cable and the worker."),
    "service": ("services.cli.service:command", "Install as a service of this machine (launchd, systemd)."),
    "drill": ("services.cli.drill:command", "Faults on purpose on your own set-up, one after the other."),
    "soak": ("services.cli.soak:command", "Mixed requests under random faults for minutes or hours."),
    "energy": (
        "services.cli.energy:command",
        "Watts and joules a token, from a battery's rate while it generated.",
    ),
    "fp16-check": (
        "services.cli.fp16_check:command",
        "Where a Gemma 3 model overflows fp16, and the scale that prevents it.",
    ),
    "chat": ("services.cli.chat:command", "Talk to the model that runs, in the terminal."),
    "keys": ("services.cli.keys:command", "CURVE keys for ZeroMQ clients on other machines."),
    "config": ("services.cli.config:command", "Show and check settings."),
    "version": ("services.cli.version:command", "Versions of everything that matters."),
}


def _show_versions(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from services.cli.version import versions_text

        click.echo(versions_text())
        context.exit()


@click.group(cls=LazyGroup, commands_at=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the trace of an error, not only its sentence.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show versions of everything that matters.",
)
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Run one language model on two devices: this host, and a worker at the end of a cable.

    Without a second device, `outrigger run` starts the worker on this machine, too. Settings come from outrigger.toml
    (or the file that OUTRIGGER_CONFIG names), OUTRIGGER_... variables and flags; `outrigger config show` lists them.
    """
    context.obj = {"debug": debug}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments or bool(os.environ.get("OUTRIGGER_DEBUG"))
    try:
        cli.main(args=arguments, prog_name="outrigger", standalone_mode=False)
    except click.exceptions.Exit as ending:
        sys.exit(ending.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except OutriggerError as error:
        if debug:
            raise
        click.echo(f"outrigger: {error}", err=True)
        sys.exit(exit_code(error))
    except BrokenPipeError:
        # `outrigger ... | head` is no failure; the interpreter must not try to flush into the closed pipe at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except OSError as error:
        if debug or error.errno not in FILE_ERRORS:
            raise
        where = f" {error.filename}" if error.filename else ""
        click.echo(f"outrigger: cannot read or write{where}: {os.strerror(error.errno).lower()}", err=True)
        sys.exit(EXIT_FAILED)


def exit_code(error: OutriggerError) -> int:
    """The code of an error that ended a command."""
    if isinstance(error, SettingError):
        return EXIT_SETTING
    return EXIT_NOT_STARTED if isinstance(error, ServiceError) else EXIT_FAILED


if __name__ == "__main__":
    main()
