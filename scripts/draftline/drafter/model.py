"""The DFlash drafter (specs: "Forward"): a small Qwen3-style stack that fills a block of mask tokens in one pass.

Shapes: T packed context rows, N blocks, B slots a block, H hidden size, F width of a context feature (tapped layers
times H), A attention heads, D head size, I intermediate size.

The target's features become the context once (`fc`, `hidden_norm`). Every layer projects that same context to keys and
values with the weights it uses for its own block; the context is never a query, never normalized again and never passes
an MLP. The drafter has no embedding and no output head: it lives between the target's.
"""

import types

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftline.compiler import compiled
from draftline.drafter.attention import Layout, attend
from draftline.drafter.config import DrafterConfig

Rotation = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32, in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Queries from the block, keys and values from context and block, by the same projections."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
        self.q_proj = nn.Linear(H, queries, bias=False)
        self.k_proj = nn.Linear(H, keys, bias=False)
        self.v_proj = nn.Linear(H, keys, bias=False)
        self.o_proj = nn.Linear(queries, H, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)
        self.head_dim, self.causal, self.window = D, config.causal(layer), config.window(layer)
        self.attend = attend

    def forward(
        self, hidden_NBH: Tensor, context_TH: Tensor, turn_block: Rotation, turn_context: Rotation, layout: Layout
    ) -> Tensor:
        result_NBAD = self.attend(
            rotate(self.q_norm(self._heads(self.q_proj(hidden_NBH))), turn_block),
            rotate(self.k_norm(self._heads(self.k_proj(hidden_NBH))), turn_block),
            self._heads(self.v_proj(hidden_NBH)),
            rotate(self.k_norm(self._heads(self.k_proj(context_TH))), turn_context),
            self._heads(self.v_proj(context_TH)),
            layout,
            self.causal,
            self.window,
        )
        return self.o_proj(result_NBAD.flatten(-2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_NBH: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden_NBH)) * self.up_proj(hidden_NBH))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Pre-norm residual layer. The context reaches the attention as it is."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, hidden_NBH: Tensor, context_TH: Tensor, turn_block: Rotation, turn_context: Rotation, layout: Layout
    ) -> Tensor:
        normed_NBH = self.input_layernorm(hidden_NBH)
        hidden_NBH = hidden_NBH + self.self_attn(normed_NBH, context_TH, turn_block, turn_context, layout)
        return hidden_NBH + self.mlp(self.post_attention_layernorm(hidden_NBH))  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """A DFlash drafter; parameter names are those of released checkpoints."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def initialized(cls, config: DrafterConfig, seed: int) -> "Drafter":
        """A fresh drafter in fp32: matrices normal with deviation 0.02, norms one. The same for a seed everywhere."""
        drafter = cls(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
        return drafter

    def fuse(self) -> None:
        """Have the elementwise steps of a layer run in few kernels, by torch's compiler, where the drafter trains on a GPU.

        One by one they take as long as half of the products. Parameters keep their names.
        """
        forward = compiled(Layer.forward, whole=False)
        apart = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]  # Its kernel is compiled by itself.
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
            layer.self_attn.attend = apart

    def context(self, features_TF: Tensor) -> Tensor:
        """Context [T, H] from context features [T, F] of any float dtype; row by row, so it may be kept and extended."""
        return self.hidden_norm(self.fc(features_TF.to(self.fc.weight.dtype)))  # type: ignore[no-any-return]

    def forward(
        self, context_TH: Tensor, positions_T: Tensor, blocks_NBH: Tensor, anchors_N: Tensor, context_start_N: Tensor
    ) -> Tensor:
        """Hidden states [N, B, H] after the final norm; the target's head on slots 1..B-1 gives their logits.

        context_TH: rows of one or several documents, each document's rows side by side from position 0 on.
        positions_T: int64, position of each row within its document.
        blocks_NBH: the target's embeddings of [anchor token, mask, ..., mask]; blocks of a document side by side.
        anchors_N: int64, the anchors' positions within their documents.
        context_start_N: int64, row of the document's position 0. Block n sees rows context_start_N[n] ..
        context_start_N[n] + anchors_N[n] (exclusive) and itself, by the rule of draftline.drafter.mask.
        """
        B = blocks_NBH.shape[1]
        layout = Layout(anchors_N, context_start_N, B, len(context_TH))
        turn_block = self._rotation(anchors_N[:, None] + torch.arange(B, device=anchors_N.device))
        turn_context = self._rotation(positions_T)
        hidden_NBH = blocks_NBH
        for layer in self.layers:
            hidden_NBH = layer(hidden_NBH, context_TH, turn_block, turn_context, layout)
        return self.norm(hidden_NBH)  # type: ignore[no-any-return]

    def _rotation(self, positions: Tensor) -> Rotation:
        """cos and sin [..., 1, D] fp32 of rotary positions over the whole head (NeoX order: two halves)."""
        D, theta = self.config.head_dim, self.config.rope_theta
        frequencies = theta ** -(torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Heads [..., D] turned by their position's angles, in x's dtype."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
