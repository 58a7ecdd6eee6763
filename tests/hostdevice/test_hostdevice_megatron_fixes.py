"""Megatron is mended when its modules are imported, and only as its known versions are."""

import pytest

UTILS = """
calls = []
def compile_helpers():
    calls.append("make")
"""
CLIP = """
import torch
from megatron.core.transformer.transformer_block import TransformerBlock
class CLIPViTModel:
    def __init__(self, config, ln_pre_impl=torch.nn.LayerNorm, subtype="clip", ln_post_impl=torch.nn.LayerNorm):
        self.norms = [norm(config=config, hidden_size=8, eps=1e-5) for norm in (ln_pre_impl, ln_post_impl)]
        self.subtype = subtype
"""
NORM = """
import torch
def local_multi_tensor_l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args):
    return torch.stack([torch.norm(tensor) for tensor in tensor_lists[0]]).norm().view(1), None
"""
BLOCK = """
class TransformerBlock: pass
class LayerNormImpl:
    def __init__(self, config, hidden_size, eps=1e-5):
        self.config = config
"""
BERT = """
bert_layer_local_spec = "local"
def __getattr__(name):
    if name != "bert_layer_with_transformer_engine_spec":
        raise AttributeError(name)
    if not HAVE_TE:
        raise ImportError("Transformer Engine is not installed")
    return "of the engine"
"""


@pytest.fixture
def megatron(tmp_path):
    """A Megatron of a few functions; returns the folder to put on the path."""
    top = tmp_path / "fake" / "megatron"

    def write(**modules):
        for name, source in {"__init__": "", **modules}.items():
            file = top / "core" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        return top.parent

    return write


@pytest.mark.parametrize(
    ("compiled", "makefile", "make"),
    [(True, False, False), (True, True, True), (False, False, True), (False, True, True)],
)
def test_make_is_skipped_only_in_a_wheel_with_the_compiled_helpers(in_process, megatron, compiled, makefile, make):
    path = megatron(**{"datasets/__init__": "", "datasets/utils": UTILS})
    if compiled:
        (path / "megatron/core/datasets/helpers_cpp.py").touch()
    if makefile:
        (path / "megatron/core/datasets/Makefile").touch()
    in_process(
        f"""
        import sys
        from recover_megatron.hostdevice import is_active, megatron_fixes
        finders = list(sys.meta_path)
        megatron_fixes.install(only=["prebuilt-helpers"])
        from megatron.core.datasets import utils
        assert sys.meta_path == finders, "the finder stays"
        utils.compile_helpers()
        assert utils.calls == {["make"] if make else []}
        assert not is_active()
        """,
        path=[path],
    )


def test_a_norm_is_right_for_many_elements_however_they_are_cut(in_process, megatron):
    """Torch's norm of these in float32 is a percent too small as one tensor, and right in small ones."""
    in_process(
        """
        import resource
        import torch
        from recover_megatron.hostdevice import megatron_fixes
        megatron_fixes.install(only=["norms-in-float64"])
        from megatron.core.utils import local_multi_tensor_l2_norm
        def norm(*tensors):
            value, per_tensor = local_multi_tensor_l2_norm(65536, None, [list(tensors)], False)
            assert (value.shape, value.dtype, per_tensor) == ((1,), torch.float32, None)
            return value.item()
        many = torch.full((1 << 24,), 0.1)
        exact = 2**12 * float(many[0])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for cut in (1 << 24, (1 << 23) + 1, 9_999_999, 1 << 21):
            assert abs(norm(*many.split(cut)) / exact - 1) < 6e-8, (cut, norm(*many.split(cut)), exact)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB; a copy in float64 has 128 MiB
        assert more < 64 << 10, more
        assert norm() == norm(torch.ones(0)) == 0.0
        assert norm(torch.ones(2, 8).t().bfloat16()) == 4.0
        assert norm(torch.tensor([torch.inf])) == float("inf") and norm(many[:2], torch.tensor([torch.nan])) != 0.0
        """,
        path=[megatron(utils=NORM)],
    )


def test_a_fix_reaches_a_module_that_is_imported_already(in_process, megatron):
    path = megatron(**{"datasets/__init__": "", "datasets/utils": UTILS, "datasets/helpers_cpp": ""})
    in_process(
        """
        from megatron.core.datasets import utils
        from recover_megatron.hostdevice import megatron_fixes
        megatron_fixes.install(only=["prebuilt-helpers"])
        megatron_fixes.install(only=["prebuilt-helpers"])
        utils.compile_helpers()
        assert utils.calls == []
        """,
        path=[path],
    )


def test_the_norms_of_a_vision_transformer_take_what_megatron_gives_a_norm(in_process, megatron):
    packages = {f"{name}/__init__": "" for name in ("transformer", "models", "models/vision")}
    path = megatron(**packages, **{"models/vision/clip_vit_model": CLIP, "transformer/transformer_block": BLOCK})
    in_process(
        """
        from recover_megatron.hostdevice import megatron_fixes
        megatron_fixes.install(only=["norms-of-vision"])
        from megatron.core.models.vision.clip_vit_model import CLIPViTModel
        model = CLIPViTModel("a config")
        assert [norm.config for norm in model.norms] == ["a config"] * 2
        assert model.subtype == "clip"
        """,
        path=[path],
    )


@pytest.mark.parametrize("there", [True, False])
def test_berts_local_layers_stand_in_for_those_of_transformer_engine(in_process, megatron, there):
    path = megatron(**{f"{name}/__init__": "" for name in ("models", "models/bert")},
                    **{"models/bert/bert_layer_specs": f"HAVE_TE = {there}\n{BERT}"})  # fmt: skip
    in_process(
        f"""
        from recover_megatron.hostdevice import megatron_fixes
        megatron_fixes.install(only=["local-layers-of-bert"])
        from megatron.core.models.bert.bert_layer_specs import bert_layer_with_transformer_engine_spec as found
        assert found == ("of the engine" if {there} else "local")
        """,
        path=[path],
    )


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ("fp8=False", (None,)),
        ("fp8=False, ckpt_manager=None, retain_input_tensors=False", (None, None, False)),
        ("ckpt_manager=False, retain_input_tensors=False", (False, False)),
    ],
)
def test_scales_are_not_given_by_default_whatever_else_a_recomputation_takes(in_process, megatron, parameters, kept):
    random = f"HAVE_TE = False\nclass CheckpointWithoutOutput:\n    def __init__(self, {parameters}): pass\n"
    path = megatron(**{"tensor_parallel/__init__": "", "tensor_parallel/random": random})
    in_process(
        f"""
        from recover_megatron.hostdevice import megatron_fixes
        megatron_fixes.install(only=["recomputed-without-scales"])
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
        assert CheckpointWithoutOutput.__init__.__defaults__ == {kept}
        """,
        path=[path],
    )


def test_fixes_not_asked_for_are_not_made(in_process, megatron):
    path = megatron(**{"pipeline_parallel/__init__": "", "pipeline_parallel/p2p_communication": "def other(): pass"})
    in_process(
        """
        from recover_megatron.hostdevice import megatron_fixes
        megatron_fixes.install(only=["prebuilt-helpers"])
        import megatron.core.pipeline_parallel.p2p_communication   # not as known, and not looked at
        """,
        path=[path],
    )


@pytest.mark.parametrize("utils", ["def compile_helpers(jobs): pass", "def build(): pass"])
def test_an_unknown_megatron_is_refused_by_name_and_version(in_process, megatron, utils):
    path = megatron(**{"datasets/__init__": "", "datasets/utils": utils})
    in_process(
        """
        from recover_megatron.hostdevice import megatron_fixes
        megatron_fixes.install()
        try:
            import megatron.core.datasets.utils
        except megatron_fixes.UnsupportedMegatron as error:
            assert "megatron.core.datasets.utils.compile_helpers" in str(error) and "0.18 to 0.19" in str(error)
        else:
            raise AssertionError("not refused")
        """,
        path=[path],
    )


def test_an_unknown_fix_is_a_programming_error():
    from recover_megatron.hostdevice import megatron_fixes

    with pytest.raises(KeyError):
        megatron_fixes.install(only=["no-such-fix"])
