"""Faults that the simulated runs must find: edits of the kernels' source, each behind a switch that is off unless
CUDASIM_FAULT selects it, so that one build contains them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

CSRC = Path(__file__).resolve().parents[2] / "csrc"
WRONG_RESULT = "^E +(AssertionError|assert )"
HOPPER_PRODUCT = "multiply_keys<T, kDim, kKeys>(x, q + tile * kRows * kDim, k + ring.stage * kKeys * kDim);"
HOPPER_RELEASE = "if (tile == tiles - 1) ring.release();"
TICKET = "if (threadIdx.x == 0) ticket = atomicAdd(memory.next, 1u);"
NEVER_ENDS = (
    r"deadlock: load_acquire at \S+in_place.cuh:\d+, \d+ times, and nothing changes; \d+ clusters have not started"
)


class Fault(NamedTuple):
    op: str  # whose tests find it
    file: str  # in csrc/cuda
    right: str  # a statement or an expression that occurs once
    wrong: str  # its replacement; empty: remove it
    tests: str
    says: str = WRONG_RESULT
    build: str = "plain"
    order: int = 0  # of threads


def race(file: str) -> dict[str, str]:
    return {"build": "thread", "says": rf"ThreadSanitizer: data race.* csrc/cuda/{file}:\d+"}


FAULTS = {
    "compact_kv_ writes before all have read": Fault(
        "compact_kv_",
        "in_place.cuh",
        "__syncthreads_or(rows != 0);  // the whole chunk has been read",
        "",
        "test_layouts",
    ),
    "compact_kv_ writes before the chunks before have been read": Fault(
        "compact_kv_",
        "in_place.cuh",
        "threadIdx.x < 2 && reader < chunk",
        "false",
        "test_all_rows_move_a_little",
        order=2,
    ),
    "compact_kv_ waits for one of two chunks": Fault(
        "compact_kv_",
        "in_place.cuh",
        "threadIdx.x < 2 && reader < chunk",
        "threadIdx.x < 1 && reader < chunk",
        "test_all_rows_move_a_little",
        order=5,
    ),
    "compact_kv_ looks for the chunk to wait for among 32 alone": Fault(
        "compact_kv_",
        "in_place.cuh",
        "(size + 31) / 32",
        "1",
        "test_all_rows_move_a_little",
        order=5,
    ),
    "compact_kv_ says that its chunk is read before it is": Fault(
        "compact_kv_",
        "in_place.cuh",
        "flags_ && threadIdx.x < 32",
        "flags_ && threadIdx.x == 0 ? store_release(flags_ + chunk, 1u) : void(), flags_ && threadIdx.x < 32",
        "test_all_rows_move_a_little",
        order=5,
    ),
    "compact_kv_ takes no tickets": Fault(
        "compact_kv_",
        "in_place.cuh",
        TICKET,
        "if (threadIdx.x == 0) ticket = blockIdx.x;",
        "test_all_rows_move_a_little",
        says=NEVER_ENDS,
        order=1,
    ),
    "ladder_compact_'s chunks descend in ticket order": Fault(
        "ladder_compact_",
        "in_place.cuh",
        TICKET,
        "if (threadIdx.x == 0) ticket = gridDim.x - 1 - atomicAdd(memory.next, 1u);",
        "test_all_rows_move_a_little",
        says=NEVER_ENDS,
    ),
    "ladder_compact_ writes before all have read": Fault(
        "ladder_compact_",
        "in_place.cuh",
        "__syncthreads_or(rows != 0);  // the whole chunk has been read",
        "",
        "test_layouts",
        **race("ladder_compact_.cuh"),
    ),
    "ladder_compact_ reads before all shifts are written": Fault(
        "ladder_compact_",
        "ladder_compact_.cuh",
        "__syncthreads();  // the shifts are written",
        "",
        "test_all_rows_move_a_little",
        **race("ladder_compact_.cuh"),  # its result depends on what the memory held before
    ),
    "gather_kv writes a row too many": Fault(
        "gather_kv",
        "gather_kv.cuh",
        "first + u * step < m",
        "first + u * step <= m",
        "test_dtypes_and_head_dims",
        says=r"heap-buffer-overflow.* csrc/cuda/gather_kv.cuh:\d+",
        build="address",
    ),
    "compact_kv_ writes to a page that does not exist": Fault(
        "pages", "compact_kv_.cuh", "data.has_page(to)", "true", "test_rows_are_moved_between_pages"
    ),
    "anchor_cosine looks up rows past the end of the table": Fault(
        "pages",
        "anchor_cosine.cuh",
        "next_.row(u, u < left_)",
        "next_.row(u)",
        "test_entries_that_name_no_page and anchor",
        says="Segmentation fault",
    ),
    "window_attention treats rows of two pages as one page": Fault(
        "pages", "window_attention.cuh", "rows.strided(0, kGroupKeys)", "true", "test_every_call and window_attention"
    ),
    "select_topk counts without atomics": Fault(
        "select_topk",
        "select.cuh",
        "atomicAdd(&histogram[bin < digit.bins ? bin : unread], 1);",
        "++histogram[bin < digit.bins ? bin : unread];",
        "test_lengths_of_rows and 4099",
        **race("select.cuh"),
    ),
    "select_topk reads before all have counted": Fault(
        "select_topk",
        "select_topk.cuh",
        "__syncthreads();  // all threads have counted",
        "",
        "test_lengths_of_rows and 4099",
    ),
    "select_topk reads other blocks' histograms before they have counted": Fault(
        "select_topk",
        "select_topk.cuh",
        "blocks.sync();  // all blocks have counted",
        "",
        "test_long_rows_on_several_gpus and 1",
        says="of_block before the first cluster_sync",
    ),
    "select_topk's blocks end while others read their memory": Fault(
        "select_topk",
        "select_topk.cuh",
        "blocks.sync();  // no other block reads this one's shared memory any more",
        "",
        "test_long_rows_on_several_gpus and 1",
        says="its block returns while another may still read its shared",
    ),
    "lag_score reads the reference before all have written": Fault(
        "lag_score",
        "lag_score.cuh",
        "__syncthreads();  // the reference is written; the ranges may be overwritten",
        "",
        "test_layouts_change_nothing",
    ),
    "lag_score reads the other blocks of its cluster before they have published": Fault(
        "lag_score",
        "lag_score.cuh",
        "cluster_sync();  // all blocks have published; the next step uses the other buffer",
        "",
        "test_clusters_change_nothing",
        says="of_block before the first cluster_sync",
    ),
    "anchor_cosine overwrites sums before all have been read": Fault(
        "anchor_cosine",
        "anchor_cosine.cuh",
        "__syncthreads();  // they have been read and may be overwritten",
        "",
        "test_a_batch_changes_nothing",
        **race("anchor_cosine.cuh"),
    ),
    "anchor_cosine adds up before all have written": Fault(
        "anchor_cosine",
        "anchor_cosine.cuh",
        "__syncthreads();  // the warps' sums are written",
        "",
        "test_layouts_change_nothing",
    ),
    "anchor_cosine does not wait for its copies": Fault(
        "anchor_cosine", "anchor_cosine.cuh", "wait_for_copies<kStages - 1>();", "", "test_layouts_change_nothing"
    ),
    "outlier_degree walks before all factors are written": Fault(
        "outlier_degree",
        "outlier_degree.cuh",
        "__syncthreads();  // all factors are written",
        "",
        "test_dtypes_and_head_dims",
    ),
    "outlier_degree multiplies with one neighbour too many": Fault(
        "outlier_degree",
        "outlier_degree.cuh",
        "distance <= kappa",
        "distance <= kappa + 1",
        "test_narrow_and_wide_rows",
    ),
    "outlier_degree does not wait for its copies": Fault(
        "outlier_degree",
        "outlier_degree.cuh",
        "wait_for_copies<kStages - 1>();",
        "",
        "test_dtypes_and_head_dims",
        order=2,
    ),
    "outlier_degree adds up similarities before all have written": Fault(
        "outlier_degree",
        "outlier_degree.cuh",
        "__syncthreads();  // the block's similarities are written",
        "",
        "test_a_batch_changes_nothing",
        **race("outlier_degree.cuh"),
    ),
    "assign_prototypes multiplies before all prototypes are loaded": Fault(
        "assign_prototypes",
        "assign_prototypes.cuh",
        "__syncthreads();  // the prototypes are loaded",
        "",
        "test_dtypes_and_head_dims",
    ),
    "quadratic_scores multiplies before its chunk is loaded": Fault(
        "quadratic_scores",
        "quadratic_scores.cuh",
        "__syncthreads();  // the chunk is loaded",
        "",
        "test_dtypes_and_head_dims",
    ),
    "quadratic_scores leaves out a piece of the diagonal": Fault(
        "quadratic_scores",
        "quadratic_scores.cuh",
        "min(pieces, 4 * (step + 1))",
        "min(pieces, 4 * step)",
        "test_narrow_and_wide_rows",
    ),
    "quadratic_scores leaves out the diagonal's step on the tensor cores": Fault(
        "quadratic_scores",
        "quadratic_scores.cuh",
        "of * kPieces + p > last",
        "of * kPieces + p >= last",
        "test_narrow_and_wide_rows",
    ),
    "trig_scores scores one slot too many": Fault(
        "trig_scores",
        "trig_scores.cuh",
        "there && is_finite(score)",
        "slot <= last && is_finite(score)",
        "test_padded_rows_score_as_if_alone",
    ),
    "trig_scores takes keys that have not arrived": Fault(
        "trig_scores",
        "trig_scores.cuh",
        "wait_for_copies<0>();",
        "",
        "test_dtypes_and_head_dims",
    ),
    "trig_scores leaves out the norms' second parts": Fault(
        "trig_scores",
        "trig_scores.cuh",
        "x[e] += rest[e];",
        "",
        "test_dtypes_and_head_dims",
    ),
    "key_similarity multiplies before a panel is loaded": Fault(
        "key_similarity",
        "panels.cuh",
        "__syncthreads();  // the panel is loaded",
        "",
        "test_dtypes_and_head_dims",
    ),
    "value_norm writes norms past the last value": Fault(
        "value_norm",
        "value_norm.cuh",
        "lane % 4 == i && its < left",
        "lane % 4 == i",
        "test_dtypes_and_head_dims",
        says=r"heap-buffer-overflow.* csrc/cuda/value_norm.cuh:\d+",
        build="address",
    ),
    "cluster_mean adds without atomics": Fault(
        "cluster_mean",
        "cluster_mean.cuh",
        "atomicAdd(high + cluster, static_cast<unsigned>(sum >> 32) + carry);",
        "high[cluster] += static_cast<unsigned>(sum >> 32) + carry;",
        "test_the_order",
        **race("cluster_mean.cuh"),
    ),
    "cluster_mean adds without atomics across blocks": Fault(
        "cluster_mean",
        "cluster_mean.cuh",
        "atomicAdd(sums + cluster, sum);",
        "sums[cluster] += sum;",
        "test_many_tokens",
        build="memory",
        order=2,
    ),
    "window_scores multiplies before all queries are written": Fault(
        "window_scores",
        "window_scores.cuh",
        "__syncthreads();  // queries, weights and limits are written",
        "",
        "test_dtypes_and_head_dims",
    ),
    "window_scores adds up rows before all warps have": Fault(
        "window_scores",
        "window_scores.cuh",
        "__syncthreads();  // all states are final",
        "",
        "test_limits",
        **race("window_scores.cuh"),
    ),
    "window_scores lets rows see one key too many": Fault(
        "window_scores", "window_scores.cuh", "j < limits[r]", "j <= limits[r]", "test_limits"
    ),
    "drop_scores multiplies before the rows are there": Fault(
        "drop_scores",
        "drop_scores.cuh",
        "__syncthreads();  // the rows are there",
        "",
        "test_dtypes_and_head_dims",
        **race("drop_scores.cuh"),
    ),
    "drop_scores leaves out what rounding left of an output": Fault(
        "drop_scores", "drop_scores.cuh", "z[0][t][e]", "0.0f", "test_values_that_are_alike"
    ),
    "drop_scores expands the distances of large weights": Fault(
        "drop_scores", "drop_scores.cuh", "weight > kLargeWeight", "false", "test_a_key_with_nearly_all"
    ),
    "drop_scores lets rows see one key too many": Fault(
        "drop_scores", "drop_scores.cuh", "slot >= rows.limits[r]", "slot > rows.limits[r]", "test_limits"
    ),
    "window_attention gives half of the keys the biases of others": Fault(
        "window_attention",
        "window.cuh",
        "16 * m + 8 * half + threadIdx.x % 32 / 4",
        "threadIdx.x % 32 / 4",
        "test_key_bias",
    ),
    "window_attention forgets the scales of int8 keys": Fault(
        "window_attention", "window.cuh", "x *= scale;", "", "test_int8"
    ),
    "window_attention reads the scales of values that no row sees": Fault(
        "window_attention",
        "window.cuh",
        "value_scale(key + lane, lane < left)",
        "value_scale(key + lane, true)",
        "test_scales_of_unseen_slots",
    ),
    "window_attention splits sums by the GPU": Fault(
        "window_attention",
        "window.cuh",
        "148 / row_blocks",
        "multiprocessors() / 2 / row_blocks",
        "test_the_gpu_changes_nothing",
    ),
    "window_attention does not wait for its copies": Fault(
        "window_attention", "window_attention.cuh", "wait_for_stage<3>(plan.stages);", "", "test_limits"
    ),
    "window_attention reads keys before all have copied": Fault(
        "window_attention", "window_attention.cuh", "meet();  // the tile has arrived", "", "test_limits"
    ),
    "window_attention rotates keys before all lanes have copied theirs": Fault(
        "window_attention",
        "window_attention.cuh",
        "__syncwarp();  // the warp's own keys have arrived",
        "",
        "test_keys_turn and 128",
    ),
    "window_attention rotates keys by the angle of the warp's first": Fault(
        "window_attention",
        "window_attention.cuh",
        "rope.sin.row(b, slot + key)",
        "rope.sin.row(b, slot)",
        "test_keys_turn and 128",
    ),
    "window_attention adds up before all warps have written": Fault(
        "window_attention",
        "window_attention.cuh",
        "__syncthreads();  // all warps' sums are written",
        "",
        "test_limits",
    ),
    "window_attention copies over a tile before all have read it": Fault(
        "window_attention",
        "window_attention.cuh",
        "meet();  // the tile may be overwritten",
        "",
        "test_window_sizes and 256",
        order=2,
    ),
    "a Hopper kernel releases keys before it has read them": Fault(
        "sm90",
        "sm90/window_scores.cuh",
        f"{HOPPER_PRODUCT}\n      {HOPPER_RELEASE}",
        f"{HOPPER_RELEASE} {HOPPER_PRODUCT}",
        "test_lengths and 1000",
        order=2,
    ),
    "a Hopper kernel multiplies queries that it has not fenced": Fault(
        "sm90",
        "sm90/window_scores.cuh",
        "share_stores(kConsumers, kAllConsumers);",
        "meet(kConsumers, kAllConsumers);",
        "test_lengths and 64",
        says=r"window_scores_sm90_kernel.* wgmma at \S+window_scores.cuh:\d+: .* no fence",
    ),
    "a Hopper kernel puts its stages where no swizzle starts": Fault(
        "sm90",
        "sm90/window_attention.cuh",
        "kGroups * kRows * d * 2",
        "kGroups * kRows * d * 2 + 512",
        "test_lengths and 1000",
        says=r"TMA copy at \S+tile.cuh:\d+: not at a multiple of 1024",
    ),
    "a Hopper kernel rounds weights into registers that a product still reads": Fault(
        "sm90",
        "sm90/window_attention.cuh",
        "next.release();",
        "next.release(); weights.round(x);",
        "attention",
        says=r"wgmma at \S+window_attention.cuh:\d+: its weights have changed",
    ),
    "a Hopper kernel releases keys before it has waited for the product": Fault(
        "sm90",
        "sm90/window_attention.cuh",
        "begin_keys<T, kDim, kKeys>(x, q, stage_of(from));",
        "begin_keys<T, kDim, kKeys>(x, q, stage_of(from)); from.release();",
        "test_lengths and 1000",
        says=r"released before it has waited for wgmma at \S+window_attention.cuh:\d+",
    ),
    "a Hopper kernel releases a panel before it has waited for the product": Fault(
        "sm90",
        "sm90/panels.cuh",
        "wait_products<0>(x);\n      ring.release();",
        "ring.release(); wait_products<0>(x);",
        "test_norms_of_sizes",
        says=r"released before it has waited for wgmma at \S+panels.cuh:\d+",
    ),
    "a Hopper kernel ends its pass without a word to those that wait": Fault(
        "sm90",
        "sm90/panels.cuh",
        "return barrier_arrive(ring.full + ring.stage);",
        "return;",
        "test_similarity_that_ends_early",
        says=r"deadlock: .*wait in mbarrier.try_wait at \S+tile.cuh:\d+",
    ),
    "a Hopper kernel writes norms past the last value": Fault(
        "sm90",
        "sm90/value_norm.cuh",
        "thread % 4 == r && its < count",
        "thread % 4 == r",
        "test_norms_of_sizes and 129",
        says=r"heap-buffer-overflow.* csrc/cuda/sm90/value_norm.cuh:\d+",
        build="address",
    ),
    "a Hopper kernel takes a key for similar to itself": Fault(
        "sm90", "last_similar.cuh", "other > last && other != itself", "other > last", "test_similarity_of_lengths"
    ),
    "a Hopper kernel does not fence its mbarriers": Fault(
        "sm90",
        "sm90/window_attention.cuh",
        "barriers_made();",
        "",
        "test_lengths and 1000",
        says=r"no barriers_made\(\) since barrier_init",
    ),
    "a Hopper kernel takes more registers than others have given": Fault(
        "sm90",
        "sm90/window_attention.cuh",
        "take_registers<kPassRegisters>();",
        "take_registers<kPassRegisters + 8>();",
        "test_lengths and 1000",
        says=r"deadlock: .*wait in take_registers at \S+window_attention.cuh:\d+",
    ),
}


def switch_of(fault: Fault) -> int:
    """Its number for CUDASIM_FAULT. Faults with the same edit share a switch, even if their tests differ."""
    changes = [(x.file, x.right, x.wrong) for x in FAULTS.values()]
    return 1 + changes.index((fault.file, fault.right, fault.wrong))


def plant(to: Path) -> None:
    """Copies csrc with the faults behind their switches, keeping line numbers. Does not rewrite unchanged files."""
    changes = {switch_of(x): x for x in FAULTS.values()}
    for path in filter(Path.is_file, CSRC.rglob("*")):
        text = path.read_text()
        for switch, (_, file, right, wrong, *_) in changes.items():
            if path == CSRC / "cuda" / file:
                text = planted(text, file, right, switched(right, wrong, switch))
        target = to / path.relative_to(CSRC)
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


def planted(text: str, file: str, right: str, switch: str) -> str:
    """Replaces `right`, which must occur once as code, by the switch. A trailing comment may identify a statement."""
    assert text.count(right) == 1, f"{file} has changed: {right!r} is there {text.count(right)} times"
    begin = text.index(right)
    end = begin + len(right)
    assert code_of(text)[begin:end] == code_of(right), f"{file} has changed: {right!r} is in a comment"
    return text[:begin] + switch + text[end:]


def code_of(text: str) -> str:
    """The text with comments replaced by blanks."""
    return re.sub(
        r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/',
        lambda found: found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0]),
        text,
        flags=re.DOTALL,
    )


def switched(right: str, wrong: str, switch: int) -> str:
    code = re.sub("//.*", "", right)
    if code.rstrip().endswith(";"):
        return f"if (cudasim::fault({switch})) {{ {wrong} }} else {{ {code} }}"
    return f"(cudasim::fault({switch}) ? ({wrong}) : ({code}))"
