"""The host's half of the greeting, and what the worker's half must say. Pure.

An error raised here is final: trying again helps nobody until a person changes something. Used by services.bridge.pump.
"""

from __future__ import annotations

from common.errors import BasePeerError, FingerprintError, ModelError, OutriggerError, RemoteProtocolError
from common.limits import FRAME_BYTES_MAX, MIB
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.fingerprint import difference, fingerprint
from common.wire.messages import LinkHello

FINAL_CODES = (ModelError.code, FingerprintError.code, RemoteProtocolError.code)
"""Codes of a worker's refusal after which the same greeting would be refused again."""


def greeting(hello: LinkHello, boot_id: int) -> ext.Hello3:
    """HELLO3 for the layers that the mac process wants run."""
    text = hello.fingerprint_text
    return ext.Hello3(
        ext_min=ext.EXTENSION_VERSION,
        ext_max=ext.EXTENSION_VERSION,
        boot_id=boot_id,
        features=ext.FEATURE_ROW_STATE | ext.FEATURE_SNAPSHOTS | (ext.FEATURE_OUTPUT if hello.output else 0),
        lse_base=ext.LSE_BASE_NATURAL,
        kv_type=hello.kv_type,
        page_tokens=hello.page_tokens,
        group_pages=hello.group_pages,
        frame_mib_max=FRAME_BYTES_MAX // MIB,
        window=hello.window,
        split_layer=hello.split_layer,
        n_layer_full=hello.n_layer_full,
        n_embd=hello.n_embd,
        n_vocab=hello.n_vocab,
        n_ctx=hello.n_ctx,
        device=base.bounded_text(hello.device, 64),
        fingerprint=fingerprint(text),
        text=text,
    )


def accepted(hello: LinkHello, answer: ext.Hello3Ok) -> LinkHello:
    """The worker's half as the mac process reads it. Raises what `is_final` knows, when it does not fit ours."""
    if answer.fingerprint != fingerprint(hello.fingerprint_text):
        raise FingerprintError(difference(hello.fingerprint_text, answer.text))
    if answer.lse_base != ext.LSE_BASE_NATURAL:
        raise RemoteProtocolError(
            f"the worker's log-sum-exp has base {answer.lse_base}; only 1 (natural) is known"
        )
    if not answer.features & ext.FEATURE_ROW_STATE:
        raise BasePeerError("the worker has no row state, so it cannot take tail layers")
    if hello.output and not answer.features & ext.FEATURE_OUTPUT:
        raise RemoteProtocolError(
            "the worker gives no logits, which split decode needs: run a newer outrigger there"
        )
    return LinkHello(
        split_layer=answer.split_layer,
        n_layer_full=answer.n_layer_full,
        n_embd=answer.n_embd,
        n_vocab=answer.n_vocab,
        n_ctx=answer.n_ctx,
        kv_type=answer.kv_type,
        fingerprint_text=answer.text,
        window=min(answer.window, hello.window),
        page_tokens=answer.page_tokens,
        group_pages=answer.group_pages,
        device=answer.device,
        output=hello.output,
    )


def base_peer(text: str) -> BasePeerError:
    """What to say of a peer that answered HELLO3 with ERR."""
    return BasePeerError(
        f"the peer speaks the base protocol only (it said '{text[:100]}'): it lacks ROWS state "
        f"({base.STATE_FORMAT_ROWS:#x}), epochs, sequence numbers and hashes, without which tail layers are not given "
        f"away; run `outrigger worker` there"
    )


def is_final(error: OutriggerError) -> bool:
    """Whether greeting again is useless until somebody changes something."""
    return isinstance(error, (BasePeerError, ModelError)) or error.code in FINAL_CODES
