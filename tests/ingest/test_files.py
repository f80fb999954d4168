"""`routepack ingest` and the files it reads: the form of every engine, and every refusal."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from cli_helpers import run
from ingest.helpers import ALL, MOE, SPEC, b64, npy, trace
from routepack.cli import terminal
from routepack.errors import InputError
from routepack.files import read_window
from routepack.ingest.files import read_samples

MODEL = ("--num-experts", "4", "--top-k", "2", "--moe-layers", "1-2")
T1 = [[2, 2, 1, 1], [1, 1, 2, 2]]  # demand of tokens 0 to 2, as in test_cases


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled before any test, as that takes long and says so on stderr."""
    terminal.loading_kernels("routepack.ingest")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written to the current directory."""
    monkeypatch.chdir(tmp_path)


def lines(*records: Any, name: str = "in.jsonl") -> str:
    """A file of JSON lines, with a blank one."""
    Path(name).write_text("\n\n".join(json.dumps(record) for record in records) + "\n")
    return name


def demands(engine: str, name: str = "in.jsonl") -> list[Any]:
    """What `read_samples` makes of a file."""
    return [sample.demand_LE.tolist() for sample, _ in read_samples([Path(name)], engine, SPEC)]


ROWS = ALL[:3]
INT32 = ROWS.astype(np.int32)
RECORDS: list[tuple[str, dict[str, Any]]] = [
    ("vllm", {"length": 4, "routed_experts": ROWS.tolist()}),
    ("vllm", {"prompt_token_ids": [1], "token_ids": [2, 3, 4], "routed_experts": npy(ROWS)}),
    (
        "vllm",
        {
            "prompt_token_ids": [1, 2],
            "prompt_routed_experts": MOE[:2].tolist(),
            "choices": [{"token_ids": [3, 4], "routed_experts": MOE[2:3].tolist()}],
        },
    ),
    ("sglang", {"length": 4, "meta_info": {"routed_experts": b64(INT32)}}),
    (
        "sglang",
        {
            "meta_info": {
                "prompt_tokens": 3,
                "completion_tokens": 1,
                "routed_experts": b64(ROWS.astype(np.uint8)),
                "routed_experts_dtype": "uint8",
            }
        },
    ),
    ("verl", {"length": 4, "routed_experts": [*ROWS.tolist(), [[0, 0]] * 3]}),
    ("slime", {"tokens": [1, 2, 3, 4], "rollout_routed_experts": ROWS.tolist()}),
    ("miles", {"length": 4, "rollout_routed_experts": npy(ROWS)}),
    ("nemo-rl", {"length": 4, "routed_experts": f"nrlre1:int32:3x3x2:{b64(INT32)}"}),
    (
        "prime-rl",
        {
            "token_ids": [1, 2, 3, 4],
            "routed_experts": {"data": b64(INT32), "shape": [3, 3, 2], "dtype": "int32"},
        },
    ),
    (
        "areal",
        {
            "input_tokens": [1, 2],
            "output_tokens": [3, 4],
            "routed_experts": [*ALL[:1].reshape(1, 6).tolist(), *ROWS.reshape(3, 6).tolist()],
            "segment_ends": [2, 4],
        },
    ),
]


@pytest.mark.parametrize(("engine", "record"), RECORDS)
def test_json_lines(engine: str, record: dict[str, Any]) -> None:
    """One sample a line, in the engine's own fields."""
    lines(record, record)
    assert demands(engine) == [T1, T1]


def test_suffix_in_json_lines() -> None:
    """The start is in the record of vLLM and SGLang, and in the payload of prime-rl."""
    one = ALL[2:3].astype(np.int32)
    start = {"routed_experts_prompt_start": 2}
    lines({"length": 4, "routed_experts": one.tolist()} | start)
    assert demands("vllm") == [[[1, 0, 0, 1], [0, 1, 1, 0]]]
    lines({"length": 4, "routed_experts": b64(one), "routed_experts_start_len": 2})
    assert demands("sglang") == [[[1, 0, 0, 1], [0, 1, 1, 0]]]


def arrays(kind: str, **tensors: Any) -> str:
    """A .npz or .safetensors file."""
    named = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    if kind == "npz":
        np.savez(f"in.{kind}", **named)
    else:
        save_file(named, f"in.{kind}")
    return f"in.{kind}"


def packed(rows: NDArray[Any], **more: Any) -> dict[str, Any]:
    """Two equal samples one behind the other."""
    offsets = np.array([0, len(rows), 2 * len(rows)])
    both = np.concatenate([rows, rows])
    return {"routed_experts": both, "offsets": offsets, "lengths": np.array([4, 4])} | more


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "verl", "slime", "miles", "prime-rl"])
def test_arrays(kind: str, engine: str) -> None:
    """Rows of all samples with offsets and lengths."""
    name = arrays(kind, **packed(ROWS.astype(np.uint8)))
    assert demands(engine, name) == [T1, T1]


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_arrays_of_one_engine(kind: str) -> None:
    """Padded batches of verl and NeMo-RL, AReaL's flat rows, suffixes, one row a token."""
    rows = np.concatenate([ROWS, ROWS[:1] * 0]).astype(np.int16)
    mask = np.array([[0, 1, 1, 1, 1]])
    padded = np.concatenate([rows[3:], rows])[None]
    assert demands("verl", arrays(kind, routed_experts=padded, attention_mask=mask)) == [T1]
    assert demands("nemo-rl", arrays(kind, routed_experts=rows[None], lengths=[4])) == [T1]
    flat = packed(ROWS.reshape(3, 6).astype(np.int32))
    assert demands("areal", arrays(kind, **flat)) == [T1, T1]
    assert demands("verl", arrays(kind, routed_experts=rows, offsets=[0, 4])) == [T1]
    suffix = packed(MOE[2:3].astype(np.uint8), starts=[2, 2], group=[7, 7], step=[0, 1])
    assert demands("sglang", arrays(kind, **suffix)) == [[[1, 0, 0, 1], [0, 1, 1, 0]]] * 2
    labels = [labels for _, labels in read_samples([Path(f"in.{kind}")], "vllm", SPEC)]
    assert labels == [{"group": 7, "step": 0}, {"group": 7, "step": 1}]


def test_command() -> None:
    """Two files to a window that `inspect` reads, and the summary in full."""
    partial = ALL[:3].copy()
    partial[0, 1] = 0
    first = lines(
        {"length": 4, "rollout_routed_experts": ROWS.tolist(), "group": 3, "tag": 1},
        {"length": 2, "rollout_routed_experts": None, "group": 3, "tag": 0},
        name="first.jsonl",
    )
    second = lines(
        {"length": 4, "rollout_routed_experts": partial.tolist(), "group": 4, "tag": 1},
        name="second.jsonl",
    )
    command = ("ingest", first, second, "--engine", "slime", *MODEL, "--model", "tiny")
    code, out, err = run(*command, "--partial-rows", "missing", "--out", "w.safetensors")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "samples                 3",
        "samples without routes  1",
        "tokens                 10",
        "captured rows           5",
        "missing rows            5",
        "missing last rows       3",
        "partial rows            1",
        "padding rows            0",
        "duplicate rows          0",
        "wrote w.safetensors: 2 layers x 4 experts, top-2",
    ]
    window = read_window("w.safetensors")
    assert window.lengths_S.tolist() == [4, 2, 4]
    assert window.missing_S.tolist() == [1, 2, 2]
    assert window.group_S is not None
    assert window.group_S.tolist() == [3, 3, 4]
    assert window.tag_S is not None
    assert window.tag_S.tolist() == [1, 0, 1]
    assert window.step_S is None
    assert window.moe_layers == (1, 2)
    assert (window.model, window.source) == ("tiny", "slime: first.jsonl, second.jsonl")
    assert window.demand_SLE.tolist() == [T1, [[0] * 4] * 2, [[1, 1, 1, 1], [1, 1, 1, 1]]]
    assert run("inspect", "w.safetensors", "--ep", "2")[0] == 0


def test_command_on_a_trace() -> None:
    """Megatron's files of two ranks; one of two steps."""
    for rank in (0, 1):
        records = [*trace(MOE, rank=rank), *trace(MOE[:3], rank=rank, step=8)]
        lines(*records, name=f"router_trace_rank{rank}.jsonl")
    files = [f"router_trace_rank{rank}.jsonl" for rank in (0, 1)]
    command = ("ingest", *files, "--engine", "megatron", *MODEL, "--out", "w")
    code, _, err = run(*command)
    assert (code, err) == (
        2,
        f"error: {files[0]}:5: step[2] = 8:"
        " expected 7, as before: choose one step, a window holds no more\n",
    )
    assert not Path("w").exists()
    assert run(*command, "--step", "8")[0] == 0
    window = read_window("w")
    assert window.lengths_S.tolist() == [3, 3]
    assert window.demand_SLE.tolist() == [T1, T1]


def test_one_expert_per_token() -> None:
    """--zero-rows says what zeros are; all layers are MoE layers without --moe-layers."""
    lines({"length": 3, "routed_experts": [[[0]], [[1]], [[0]]]})
    command = ("ingest", "in.jsonl", "--engine", "vllm", "--num-experts", "2", "--top-k", "1")
    code, _, err = run(*command, "--out", "w")
    assert (code, err) == (
        2,
        "error: in.jsonl:1: routed_experts[0] = 0 at every MoE layer: expected zero_rows to say if"
        " that is 'routed' to expert 0 or 'missing', top_k is 1\n",
    )
    assert run(*command, "--out", "w", "--zero-rows", "routed")[0] == 0
    assert read_window("w").demand_SLE.tolist() == [[[2, 1]]]
    assert run(*command, "--out", "w", "--zero-rows", "missing")[0] == 0
    assert read_window("w").demand_SLE.tolist() == [[[0, 1]]]


GOOD = {"length": 4, "routed_experts": ROWS.tolist()}
BAD_RECORDS: list[tuple[str, Any, str]] = [
    ("vllm", 5, "line = int: expected a JSON object"),
    ("vllm", GOOD | {"group": "a"}, "group = 'a': expected a whole number"),
    ("vllm", {}, "prompt_token_ids = None: expected a list of tokens, or length for"),
    ("nemo-rl", {}, "length: expected the tokens of the sample, the record has none"),
    ("sglang", {"meta_info": 3}, "meta_info = int: expected a JSON object"),
    ("sglang", {}, "length = None: expected length, or prompt_tokens and completion_tokens in"),
    ("areal", GOOD | {"segment_ends": 4}, "segment_ends = 4: expected a list of whole numbers"),
    ("verl", GOOD | {"length": 9}, "routed_experts.shape = (3, 3, 2): expected 8 or 9 token rows"),
]


@pytest.mark.parametrize(("engine", "record", "message"), BAD_RECORDS)
def test_bad_records(engine: str, record: Any, message: str) -> None:
    """The message begins with file and line; earlier lines leave no output."""
    lines(GOOD | {"rollout_routed_experts": ROWS.tolist()} if engine != "areal" else record, record)
    with pytest.raises(InputError) as caught:
        demands(engine)
    line = 1 if engine in ("sglang", "nemo-rl", "areal", "prime-rl") else 3
    assert str(caught.value).startswith((f"in.jsonl:{line}: {message}", f"in.jsonl:3: {message}"))


BAD_ARRAYS: list[tuple[str, dict[str, Any], str]] = [
    ("vllm", {"routes": ROWS}, "array = routes: expected one of routed_experts, offsets,"),
    ("vllm", {"offsets": [0]}, "routed_experts: expected this array, the file has none"),
    ("vllm", {"routed_experts": ROWS}, "offsets: expected this array, the file has none"),
    (
        "vllm",
        {"routed_experts": ROWS, "offsets": [0, 3]},
        "lengths: expected this array, the file has none",
    ),
    (
        "slime",
        packed(ROWS, starts=[0, 0]),
        "starts: expected no such array, the engine sends no suffixes",
    ),
    (
        "vllm",
        packed(ROWS, lengths=[4]),
        "lengths = int64 (1,): expected integers (2,), one a sample",
    ),
    ("vllm", packed(ROWS, starts=[1]), "starts = int64 (1,): expected integers (2,), one a sample"),
    (
        "miles",
        packed(ROWS, lengths=[4, 5]),
        "sample 1: rollout_routed_experts.shape = (3, 3, 2): expected 4 token rows, one less than"
        " the 5 tokens",
    ),
    (
        "vllm",
        packed(ROWS, group=[0.5, 1.0]),
        "group = float64 (2,): expected integers (2,), one a sample",
    ),
    ("vllm", packed(ROWS, tag=[0, 1, 2]), "tag = int64 (3,): expected integers (2,), one a sample"),
    (
        "verl",
        {"routed_experts": ROWS[None]},
        "attention_mask: expected this array, the file has none",
    ),
]


@pytest.mark.parametrize(("engine", "tensors", "message"), BAD_ARRAYS)
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_bad_arrays(kind: str, engine: str, tensors: dict[str, Any], message: str) -> None:
    """The message begins with the file."""
    name = arrays(kind, **tensors)
    with pytest.raises(InputError) as caught:
        demands(engine, name)
    assert str(caught.value).startswith(f"{name}: {message}")


def test_broken_files() -> None:
    """Files that are not what their name says, or end early."""
    for name in ("in.npz", "in.safetensors"):
        Path(name).write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"^in\.npz: expected a whole \.npz file, "):
        demands("vllm", "in.npz")
    with pytest.raises(InputError, match=r"^in\.safetensors: expected a whole safetensors file, "):
        demands("vllm", "in.safetensors")
    name = arrays("npz", **packed(ROWS))
    Path(name).write_bytes(Path(name).read_bytes()[:-40])
    with pytest.raises(InputError, match=r"^in\.npz: expected a whole \.npz file, "):
        demands("vllm", name)
    np.savez("in.npz", routed_experts=np.array([None, 1], object))
    with pytest.raises(InputError, match=r"^in\.npz: expected a whole \.npz file, Object arrays"):
        demands("vllm", "in.npz")
    with Path("in.npz").open("wb") as file:
        np.save(file, ROWS)
    with pytest.raises(InputError, match=r"^in\.npz: expected a \.npz file, it is a single array$"):
        demands("vllm", "in.npz")
    Path("in.jsonl").write_bytes(b'{"length": 4,\n')
    with pytest.raises(InputError, match=r"^in\.jsonl:1: expected a JSON object, Input data was"):
        demands("vllm")
    Path("in.jsonl").write_bytes(b'{"length": "\xff"}\n')
    with pytest.raises(InputError, match=r"^in\.jsonl:1: expected a JSON object, "):
        demands("vllm")


OPTIONS: list[tuple[Sequence[str], str]] = [
    (["--engine", "trl"], "engine = 'trl': expected one of vllm, sglang, verl, slime, miles,"),
    (["--step", "1"], "step = 1: expected none, only megatron traces have steps"),
    (["--moe-layers", "1-"], "--moe-layers = '1-': expected layers as in 1-26 or 0,2,4-9"),
    (["--moe-layers", "2-1"], "moe_layers = (): expected at least 1 MoE layer"),
    (["--moe-layers", "1,1"], "moe_layers[1] = 1: expected a layer in 2.."),
    (["--top-k", "5"], "top_k = 5: expected a whole number in 1..4"),
    (["--top-k", "x"], "--top-k = 'x': expected a whole number"),
    (["--zero-rows", "no"], "zero_rows = 'no': expected 'missing' or 'routed'"),
    (["--out", "in.jsonl"], "in.jsonl: expected a path for output, it is also in.jsonl"),
    (["--model-layers", "2"], "moe_layers[1] = 2: expected a layer in 2..1, ascending"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_bad_options(options: Sequence[str], message: str) -> None:
    """One line on stderr, exit code 2, no output."""
    lines(GOOD)
    command = ["ingest", "in.jsonl", "--engine", "vllm", *MODEL, "--out", "w", *options]
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not Path("w").exists()


def test_refused_input_leaves_the_output_as_it_was() -> None:
    """A bad second line: the window of an earlier run stays, nothing else is written."""
    lines(GOOD)
    command = ["ingest", "in.jsonl", "--engine", "vllm", *MODEL, "--out", "w"]
    assert run(*command)[0] == 0
    before = Path("w").read_bytes()
    lines(GOOD, GOOD | {"length": 2})
    assert run(*command)[0] == 2
    assert Path("w").read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl", "w"]


def test_missing_files() -> None:
    """A path that is no file, a folder, another ending, and files without a sample."""
    Path("folder.jsonl").mkdir()
    Path("empty.jsonl").write_text("\n")
    Path("in.pt").write_bytes(base64.b64decode("AAAA"))
    for path, engine, message in (
        ("none.jsonl", "vllm", "expected a file, there is none"),
        ("folder.jsonl", "vllm", "expected a file, it is a folder"),
        ("in.pt", "vllm", "expected a name that ends in .jsonl or .npz or .safetensors"),
        ("in.pt", "megatron", "expected a name that ends in .jsonl"),
        ("empty.jsonl", "vllm", "expected at least 1 sample, the files have none"),
    ):
        code, _, err = run("ingest", path, "--engine", engine, *MODEL, "--out", "w")
        assert (code, err) == (2, f"error: {path}: {message}\n")
