"""Recorded routes of any rollout engine or trainer to one form, and to the counts of a window.

Every reader returns `SampleRoutes`: the ids of the captured token rows at the MoE layers, and for
each token row whether it is captured, missing or padding. A reader refuses what it cannot be sure
of, in one line that names field, index, value and expectation. `WindowBuilder` makes a window.

`routepack.ingest.transformers`, which records a Hugging Face model, is imported on its own.
"""

from routepack.ingest.builder import WindowBuilder
from routepack.ingest.megatron import from_megatron_trace
from routepack.ingest.nemo_rl import from_nemo_rl
from routepack.ingest.prime_rl import from_prime_rl
from routepack.ingest.rows import from_rows, from_segments, without_routes
from routepack.ingest.sample import CAPTURED, MISSING, PADDING, SampleRoutes
from routepack.ingest.sglang import from_areal, from_miles, from_sglang, from_slime
from routepack.ingest.spec import RouteSpec
from routepack.ingest.verl import from_verl, from_verl_jagged, from_verl_padded
from routepack.ingest.vllm import from_vllm, from_vllm_output

__all__ = [
    "CAPTURED",
    "MISSING",
    "PADDING",
    "RouteSpec",
    "SampleRoutes",
    "WindowBuilder",
    "from_areal",
    "from_megatron_trace",
    "from_miles",
    "from_nemo_rl",
    "from_prime_rl",
    "from_rows",
    "from_segments",
    "from_sglang",
    "from_slime",
    "from_verl",
    "from_verl_jagged",
    "from_verl_padded",
    "from_vllm",
    "from_vllm_output",
    "without_routes",
]
