"""Aim: the mac process's loop answers at once, follows the link, and leaves cleanly, over real sockets.
Method: a real Host on a tiny model inside an event loop; the test speaks as gateway and as bridge."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from common.config import HostSettings
from common.engine.engine import Engine
from common.errors import SettingError
from common.metrics import Metrics
from common.model.spec import ModelSpec
from common.wire import messages as m
from common.wire.routes import GENERATE, LINK
from services.mac.host import Host, check_split_decode, choose_split_layer
from services.runtime.bus import Asker, Owner
from services.runtime.endpoints import route_endpoint

WAIT_S = 20.0


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@asynccontextmanager
async def running_host(path, run_dir, **settings):
    engine = Engine.load(path, n_ctx=1024, device="cpu")
    host = Host(engine, HostSettings(model=str(path), **settings), run_dir, Metrics("mac"))
    tasks = [asyncio.create_task(part, name=name) for name, part in host.parts()]
    host.start()
    try:
        yield host
    finally:
        await host.stop()
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


class Gateway:
    """The asking end of route "generate"."""

    def __init__(self, run_dir):
        self.asker = Asker(GENERATE, route_endpoint(run_dir, GENERATE), name="gateway")

    async def ask(self, prompt, name="r", **how):
        values = {"max_tokens": 4, "sampling": m.Sampling(), "stop_token_ids": ()}
        values |= {"deadline_s": 60.0, "credit": 100} | how
        await self.asker.send(m.Generate(name, len(prompt), **values), np.asarray(prompt, np.int32))

    async def until(self, kind, name="r"):
        """Events of request `name` up to the first of `kind`."""
        seen = []
        while not seen or not isinstance(seen[-1], kind):
            message = (await asyncio.wait_for(self.asker.receive(), WAIT_S)).message
            if getattr(message, "request_id", name) == name:
                seen.append(message)
        return seen


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 80))


def test_a_request_is_queued_read_written_and_finished_in_this_order(tiny_models, run_dir):
    async def talk():
        async with running_host(tiny_models["llama"], run_dir, split="off"):
            gateway = Gateway(run_dir)
            await gateway.ask(range(300))
            kinds = [
                type(e).__name__ for e in await gateway.until(m.Finished) if not isinstance(e, m.HostStatus)
            ]
            assert kinds == ["Queued", *["PrefillAdvanced"] * 2, *["TokenReady"] * 4, "Finished"]
            await gateway.asker.send(m.AskStatus())
            status = (await gateway.until(m.HostStatus))[-1]
            assert (status.state, status.n_ctx, status.n_vocab) == ("ready", 1024, 512)
            assert status.beat > 0 and status.worker.state == "absent"
            await gateway.asker.close()

    run(talk())


def test_waiting_requests_are_counted_cancelled_and_expired_without_touching_the_running_one(
    tiny_models, run_dir
):
    async def talk():
        async with running_host(tiny_models["llama"], run_dir, split="off", short_ctx=0):
            gateway = Gateway(run_dir)
            await gateway.ask(range(300), "long", max_tokens=400, credit=1)  # runs until it is cancelled
            await gateway.ask(range(9), "waits")
            await gateway.ask(range(9), "late", deadline_s=0.01)
            waiting = await gateway.until(m.Queued, "waits")
            assert waiting[-1].ahead >= 1
            await gateway.asker.send(m.Cancel("waits"))
            seen = {}
            while not {"waits", "late"} <= seen.keys():
                message = (await asyncio.wait_for(gateway.asker.receive(), WAIT_S)).message
                if isinstance(message, m.Finished | m.Failed):
                    seen[message.request_id] = message
            assert seen["waits"].reason == "cancelled" and seen["waits"].n_generated == 0
            assert seen["late"].code == 602
            await gateway.asker.send(m.Cancel("long"))
            end = (await gateway.until(m.Finished, "long"))[-1]
            assert end.reason == "cancelled" and end.n_generated == 1
            await gateway.asker.close()

    run(talk())


def test_who_hears_of_a_requests_end_has_heard_before_that_nothing_runs(tiny_models, run_dir):
    async def talk():
        async with running_host(tiny_models["llama"], run_dir, split="off"):
            gateway = Gateway(run_dir)
            for name, how in (("a", {}), ("b", {"deadline_s": 0.3, "credit": 1, "max_tokens": 400})):
                await gateway.ask(range(300), name, **how)
                running = None
                while True:
                    message = (await asyncio.wait_for(gateway.asker.receive(), WAIT_S)).message
                    if isinstance(message, m.HostStatus):
                        running = message.requests_running
                    if isinstance(message, m.Finished | m.Failed):
                        break
                assert running in (0, None), f"the newest status before the end of {name} said {running}"
            await gateway.asker.close()

    run(talk())


def test_who_waits_is_told_when_its_place_changes(tiny_models, run_dir):
    async def talk():
        async with running_host(tiny_models["llama"], run_dir, split="off", short_ctx=0) as host:
            gateway = Gateway(run_dir)
            await gateway.ask(range(300), "runs", max_tokens=400, credit=1)
            await gateway.until(m.TokenReady, "runs")
            for name, ahead in (("second", 1), ("third", 2)):
                await gateway.ask(range(9), name)
                assert (await gateway.until(m.Queued, name))[-1].ahead == ahead
            assert (host.status().requests_running, host.status().requests_waiting) == (1, 2)
            await gateway.asker.send(m.Cancel("second"))
            assert (await gateway.until(m.Queued, "third"))[-1].ahead == 1
            await gateway.asker.send(m.Cancel("runs"))
            assert (await gateway.until(m.Finished, "third"))[-1].reason == "length"
            await gateway.asker.close()

    run(talk())


def hello_of(message):
    assert isinstance(message, m.AttachWorker)
    return message.hello


def test_the_link_is_followed_and_attached_anew_when_the_bridge_comes_back(tiny_models, run_dir):
    async def talk():
        async with running_host(tiny_models["qwen35"], run_dir, split_layer=4) as host:
            states = []

            async def worker_state(wanted):
                async with asyncio.timeout(WAIT_S):
                    while host.status().worker.state != wanted:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                states.append(wanted)

            for life in (1, 2):
                async with Owner(LINK, route_endpoint(run_dir, LINK)) as bridge:
                    received = await asyncio.wait_for(bridge.receive(), WAIT_S)
                    hello = hello_of(received.message)
                    assert (hello.split_layer, hello.n_layer_full, hello.n_vocab) == (4, 8, 512)
                    await worker_state("connecting")
                    await bridge.send(m.LinkUp(life, hello, 90.0), to=received.peer)
                    await worker_state("ready")
                    await bridge.send(m.LinkDown(life, "refused", "other model", True), to=received.peer)
                    await worker_state("refused")
                    assert "other model" in host.status().worker.detail
                await worker_state("absent")
            assert states == ["connecting", "ready", "refused", "absent"] * 2

    run(talk())


@pytest.mark.parametrize(
    "settings, layer", [({}, 4), ({"split_layer": 3}, 3), ({"split": "off", "split_layer": 3}, 0)]
)
def test_the_split_layer(tiny_models, settings, layer):
    spec = ModelSpec.read(tiny_models["qwen35"])
    assert choose_split_layer(HostSettings(**settings), spec) == layer


def test_a_split_layer_beyond_the_model_is_refused_with_the_range(tiny_models):
    with pytest.raises(SettingError, match=r"split_layer is 8; .* 1 to 7"):
        choose_split_layer(HostSettings(split_layer=8), ModelSpec.read(tiny_models["qwen35"]))


@pytest.mark.parametrize(
    "settings, words", [({"split": "off"}, "split is off"), ({"decode": "paged"}, "decode is paged")]
)
def test_split_decode_says_what_it_cannot_be_combined_with(settings, words):
    check_split_decode(HostSettings(split_decode="on"))
    with pytest.raises(SettingError, match=words):
        check_split_decode(HostSettings(split_decode="on", **settings))
