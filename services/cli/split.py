"""`outrigger split`: writes the worker's tail file. All the work is common.model.split's."""

from __future__ import annotations

from pathlib import Path

import click

from common.model.spec import ModelSpec
from common.model.split import plan_split, write_tail
from services.cli.progress import ByteProgress


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "-L",
    "--layer",
    type=int,
    help="First layer of the tail.  [the boundary of the layer cycle nearest to 5/8 of the layers]",
)
@click.option(
    "--no-head",
    is_flag=True,
    help="Leave the output out: the host computes the logits. Stock cannot load it.",
)
def command(model: Path, out: Path, layer: int | None, no_head: bool) -> None:
    """Write the last layers of MODEL to the file OUT, for the worker.

    MODEL may itself be such a tail: layers are always numbered as in the whole model.
    """
    plan = plan_split(ModelSpec.read(model), layer, any_layer=True)
    with ByteProgress(f"writing {out}") as progress:
        write_tail(model, plan.layer, out, head=not no_head, progress=progress)
    click.echo(
        f"{out}: layers {plan.layer} to {plan.n_layer_full - 1} of {plan.n_layer_full}"
        f"{'' if no_head else ' and the output'}, {out.stat().st_size / 1e6:.1f} MB"
    )
    if not plan.on_boundary:
        click.echo(
            f"note: {plan.layer} lies inside a cycle of {plan.cycle} layers; Outrigger's own worker runs this, a "
            f"worker that speaks only the base protocol needs a multiple of {plan.cycle}",
            err=True,
        )
