"""From the options of decode's functions to the ops' argument lists, as _call.py for the others."""

from flash_attn import _checks, _log
from flash_attn._call import forced_backend, ops, window_sides
from flash_attn._errors import expect
from flash_attn._masked_call import lower_cache_mask
from flash_attn.masks import Mask


def check_append(k, v, rotary_cos, rotary_sin, cache_seqlens) -> None:
    """What the op cannot say, as it exists only with k and v."""
    expect((k is None) == (v is None), "v", "k and v together", "one of them")
    if k is not None:
        expect(cache_seqlens is not None, "cache_seqlens", "where to append k and v", "None")
        return
    both = (rotary_cos is None) == (rotary_sin is None)
    expect(both, "rotary_sin", "rotary_cos and rotary_sin together", "one of them")
    expect(rotary_cos is None, "rotary_cos", "k and v to append with it", "none")


def decode_arguments(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    alibi_slopes=None,
    learnable_sink=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    num_splits=0,
    batch_invariant=False,
    return_max_logits=False,
    shared_prefix=None,
    attn_bias=None,
    tree_mask=None,
    new=0,
):
    """The argument list of the op `decode`, and the end of that of `kvcache`, with `new` tokens."""
    prefix_source, prefix_lens = (None, None) if shared_prefix is None else shared_prefix
    if _checks.ENABLED:
        _checks.decode(
            q,
            k_cache,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=block_table,
            new=new,
        )
    window_left, window_right = window_sides(window_size)
    if isinstance(attn_bias, Mask):
        (window_left, window_right), attn_bias = lower_cache_mask(
            attn_bias,
            q,
            k_cache,
            (window_left, window_right),
            block_table,
            cache_seqlens,
            new,
        )
    return (
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        alibi_slopes,
        learnable_sink,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        window_left,
        window_right,
        softcap,
        num_splits,
        batch_invariant,
        return_max_logits,
        forced_backend(),
        prefix_source,
        prefix_lens,
        attn_bias,
        tree_mask,
    )


def decode(arguments):
    """Runs the op `decode` on decode_arguments(…). Returns out, softmax_lse, max_logits."""
    if _log.ENABLED:
        _log.call("decode", arguments)
    return ops().decode(*arguments)


def kvcache(k, v, rotary_cos, rotary_sin, rotary_interleaved, arguments):
    """The same after k and v were written to the caches, from cache_seqlens on."""
    arguments = (k, v, rotary_cos, rotary_sin, rotary_interleaved, *arguments)
    if _log.ENABLED:
        _log.call("kvcache", arguments)
    return ops().kvcache(*arguments)
