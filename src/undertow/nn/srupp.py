"""SRU++: the Simple Recurrent Unit whose matrix product holds a little attention.

Tao Lei, "When Attention Meets Fast Recurrence: Training Language Models with Reduced Compute", EMNLP 2021,
arXiv 2102.12459.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from undertow.nn.attention import WindowMask, attend
from undertow.nn.cell import Activation, GatedCell, LayerNormPlace, clear
from undertow.nn.checks import check_input, check_mask, check_probabilities, check_shape, check_sizes
from undertow.nn.linear import Linear
from undertow.nn.memory import Memory, SRUppState
from undertow.nn.stack import Stack

KeysValues = tuple[Tensor, Tensor]


class SRUppCell(GatedCell):
    """One layer of SRU++.

        z = W1 x
        q = z;  k, v = split(W2 z)
        a = softmax(q kᵀ / sqrt(p / H)) v
        u = W3 dropout(LayerNorm(z + α a))
        f_t = sigmoid(u1_t + v1 ⊙ c_{t-1} + b1)
        r_t = sigmoid(u2_t + v2 ⊙ c_{t-1} + b2)
        c_t = f_t ⊙ c_{t-1} + (1 - f_t) ⊙ u0_t
        h_t = r_t ⊙ c_t + (1 - r_t) ⊙ x_t

    (arXiv 2102.12459, section 3.) No attention: z goes straight to the LayerNorm. Where the input is not as wide as the
    output, a fourth part of u stands in for x_t. Nothing is kept between calls, so a call can be recomputed
    (`torch.utils.checkpoint`).

    Parameters: `down_proj` W1 (p, d_in), `kv_proj` W2 (2p, p), `alpha` α (1,), `norm` the LayerNorm over p, `up_proj`
    W3 (D*k*d, p), `weight_c` v (2, D*d), `bias` b (2, D*d), `layer_norm`; D is 2 for a bidirectional cell, else 1.

    Args:
        input_size: d_in, the width of x.
        hidden_size: d, the width of h and c in each direction.
        projection_size: p, the width of the attention; d / 4 or d / 8 in the paper.
        num_heads: H, attention heads; must divide p. The paper needs one.
        attention: False leaves q, k, v and α out.
        dropout: on what W3 reads, ordinary dropout.
        attention_dropout: on the attention map.
        bidirectional: a second recurrence runs from the end; attention then sees both sides.
        bias: False: the gates' biases stay at their first values.
        layer_norm: a LayerNorm "before" W1 (the highway still takes the raw x) or "after" h; "none" in the published
            runs.
        projection_layer_norm: the LayerNorm over z + α a.
        normalize_memory: False: `memory` is projected without the "before" norm, as sru 3.0.0.dev6 does. Cutting a text
            then changes its numbers.
        highway_bias: first value of b2. At -2 the highway carries x nearly untouched through a fresh deep stack.
        rescale: scales the highway's x by sqrt(1 + 2 exp(highway_bias)).
        activation: "identity" or "tanh", on c where the highway adds it.
        skip: False: h = r ⊙ c.
        alpha_init: first value of α: a fresh layer does not attend, and learns to.
        highway_dropout: one mask a row, shared over time, on what the highway adds to x.
        variational_dropout: one mask a row, shared over time, on x before W1.
        weight_c_init: v ~ U(-weight_c_init, weight_c_init).

    Raises:
        ValueError: a size below 1, a probability outside [0, 1), p not divisible by H.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        projection_size: int,
        *,
        num_heads: int = 1,
        attention: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        bidirectional: bool = False,
        bias: bool = True,
        layer_norm: LayerNormPlace = "none",
        projection_layer_norm: bool = True,
        normalize_memory: bool = True,
        highway_bias: float = -2.0,
        rescale: bool = False,
        activation: Activation = "identity",
        skip: bool = True,
        alpha_init: float = 0.0,
        highway_dropout: float = 0.0,
        variational_dropout: float = 0.0,
        weight_c_init: float = 1.0,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            bidirectional=bidirectional,
            bias=bias,
            layer_norm=layer_norm,
            highway_bias=highway_bias,
            rescale=rescale,
            activation=activation,
            skip=skip,
            highway_dropout=highway_dropout,
            variational_dropout=variational_dropout,
            weight_c_init=weight_c_init,
        )
        p = projection_size
        check_sizes(projection_size=p, num_heads=num_heads)
        check_probabilities(dropout=dropout, attention_dropout=attention_dropout)
        if p % num_heads:
            raise ValueError(f"projection_size must be divisible by num_heads, got {p} and {num_heads}")
        self.projection_size = p
        self.num_heads = num_heads
        self.attention = attention
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.normalize_memory = normalize_memory
        self.alpha_init = alpha_init

        self.down_proj = Linear(input_size, p, bias=False)
        self.kv_proj = Linear(p, 2 * p, bias=False) if attention else None
        # One element, not none: FSDP does not shard a scalar.
        self.alpha = nn.Parameter(torch.empty(1)) if attention else None
        self.norm = nn.LayerNorm(p) if projection_layer_norm else nn.Identity()
        self.up_proj = Linear(p, self.num_parts * self.output_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W1, W2, W3 Xavier uniform, W3 times sqrt(1 - dropout); α = alpha_init; the gates as in `GatedCell`."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.down_proj.weight)
        if self.kv_proj is not None and self.alpha is not None:
            nn.init.xavier_uniform_(self.kv_proj.weight)
            nn.init.constant_(self.alpha, self.alpha_init)
        nn.init.xavier_uniform_(self.up_proj.weight)
        with torch.no_grad():
            self.up_proj.weight *= (1 - self.dropout) ** 0.5
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        c0: Tensor | None = None,
        *,
        memory: Tensor | None = None,
        past: KeysValues | None = None,
        mask: Tensor | WindowMask | None = None,
        padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, KeysValues | None]:
        """Read T positions.

        Args:
            x: (B, T, d_in), the dtype of the weights unless under autocast.
            c0: (B, D*d), the c of an earlier call; None: zeros.
            memory: (B, M, d_in), inputs of the M positions before x: projected anew, so that the weights also learn
                from them.
            past: keys and values of the M positions before x, each (B, H, M, p/H), as earlier calls returned them; the
                cheaper form of `memory`.
            mask: who may attend to whom: (T, M+T), or 4-d and broadcastable to (B, H, T, M+T), bool (true: may attend)
                or float (added to the scores); or a `WindowMask`, built with the padding and the resets at hand. None:
                everything up to itself (everything, if bidirectional). A query with nothing left gets a = 0.
            padding_mask: (B, T) bool, true at padding: c passes by, h = 0, nothing attends to it, what stands there
                does not matter.
            memory_padding_mask: (B, M) bool, true at remembered positions that do not count: padding, or another
                document's.
            resets: (B, T) bool, true where a document starts: c restarts from zero, attention does not look across.

        Returns:
            h (B, T, D*d), in the dtype of u; c (B, D*d) after the last position (after the first one for the reverse
            direction), float32 if h is shorter than that; keys and values of the T positions, each (B, H, T, p/H), None
            without attention.

        Raises:
            ValueError: a shape or device that does not fit.
            TypeError: a dtype that does not fit.
        """
        self._check(x, c0, memory, past, mask, padding_mask, memory_padding_mask, resets)
        x = clear(x, padding_mask)
        z = self.down_proj(self.drop_input(self.normalise(x)))  # (B, T, p)

        new = None
        if self.kv_proj is not None and self.alpha is not None:
            q, (k, v) = self._heads(z), self._keys_values(z)
            new = (k, v)
            if memory is not None:
                memory = clear(memory, memory_padding_mask)
                past = self._keys_values(self.down_proj(self.normalise(memory) if self.normalize_memory else memory))
            if past is not None:
                k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)  # (B, H, M+T, p/H)
            if not isinstance(mask, WindowMask):
                mask = self._visible(mask, q, k.shape[2], padding_mask, memory_padding_mask, resets)
            causal = mask is None and not self.bidirectional
            a = attend(q, k, v, mask, self.attention_dropout if self.training else 0.0, is_causal=causal)
            a = a.transpose(1, 2).flatten(2)  # (B, T, p)
            z = torch.addcmul(z, a, self.alpha.to(z.dtype))  # z + α a

        u = self.up_proj(F.dropout(self.norm(z), self.dropout, self.training))  # (B, T, D*k*d)
        h, c = self.recur(u, x, c0, padding_mask, resets)
        return h, c, new

    def _heads(self, z: Tensor) -> Tensor:
        """(B, T, p) -> (B, H, T, p/H), a view."""
        return z.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _keys_values(self, z: Tensor) -> KeysValues:
        assert self.kv_proj is not None
        k, v = self.kv_proj(z).chunk(2, dim=-1)
        return self._heads(k), self._heads(v)

    def _visible(
        self,
        mask: Tensor | None,
        q: Tensor,
        S: int,
        padding_mask: Tensor | None,
        memory_padding_mask: Tensor | None,
        resets: Tensor | None,
    ) -> Tensor | None:
        """One mask from all that limits attention, broadcastable to (B, H, T, S); None where `attend` needs none."""
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        if padding_mask is None and memory_padding_mask is None and resets is None:
            return mask
        B, T, M = q.shape[0], q.shape[2], S - q.shape[2]
        if resets is not None and padding_mask is not None:
            resets = resets & ~padding_mask

        def keys(memory: Tensor | None, present: Tensor | None, dtype: torch.dtype) -> Tensor:
            memory = torch.zeros(B, M, dtype=dtype, device=q.device) if memory is None else memory
            present = torch.zeros(B, T, dtype=dtype, device=q.device) if present is None else present
            return torch.cat([memory, present], dim=1)  # (B, S)

        allowed = ~keys(memory_padding_mask, padding_mask, torch.bool)[:, None, None]
        if resets is not None:
            document = keys(None, resets.cumsum(1), torch.long)
            allowed = allowed & (document[:, None, M:, None] == document[:, None, None])
        if mask is None and not self.bidirectional:
            allowed = allowed & torch.ones(T, S, dtype=torch.bool, device=q.device).tril(M)
        if mask is None:
            return allowed
        return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)

    def _check(
        self,
        x: Tensor,
        c0: Tensor | None,
        memory: Tensor | None,
        past: KeysValues | None,
        mask: Tensor | WindowMask | None,
        padding_mask: Tensor | None,
        memory_padding_mask: Tensor | None,
        resets: Tensor | None,
    ) -> None:
        self.check_call(x, c0, padding_mask, resets)
        if not self.attention:
            if memory is not None or past is not None:
                raise ValueError("this cell has no attention: it can use neither memory nor past")
            return
        B, T, _ = x.shape
        M = 0
        if memory is not None and past is not None:
            raise ValueError("memory and past are two forms of the same positions: give one of them")
        if memory is not None:
            check_shape("memory", memory, B=B, M=None, input_size=self.input_size)
            check_input("memory", memory, self.weight_c)
            M = memory.shape[1]
        if past is not None:
            M = past[0].shape[2] if past[0].dim() == 4 else 0
            for name, tensor in zip(("past keys", "past values"), past, strict=True):
                check_shape(name, tensor, B=B, H=self.num_heads, M=M, head_size=self.projection_size // self.num_heads)
        if memory_padding_mask is not None:
            check_mask("memory_padding_mask", memory_padding_mask, self.weight_c, B=B, M=M)
        if isinstance(mask, WindowMask):
            if (mask.past, mask.length) != (M, T):
                built = f"{mask.past} remembered and {mask.length} new positions"
                raise ValueError(f"the WindowMask was built for {built}, got {M} and {T}")
        elif mask is not None:
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise TypeError(f"mask must be bool (true: may attend) or floating point (added), got {mask.dtype}")
            full = (B, self.num_heads, T, M + T)
            fits = all(m in (1, f) for m, f in zip(mask.shape[::-1], full[::-1], strict=False))
            if mask.dim() not in (2, 4) or not fits:
                raise ValueError(
                    f"mask must have shape (T={T}, M+T={M + T}), or 4 dimensions that broadcast to "
                    f"(B={B}, H={self.num_heads}, T={T}, M+T={M + T}), got {tuple(mask.shape)}"
                )

    def extra_repr(self) -> str:
        """The sizes and the options that differ from the plain cell."""
        heads = f", num_heads={self.num_heads}" if self.num_heads > 1 else ""
        return f"{super().extra_repr()}, projection_size={self.projection_size}{heads}, attention={self.attention}"


class SRUpp(Stack):
    """Layers of SRU++, used like `torch.nn.GRU`: `output, state = srupp(input, state)`.

    Args:
        input_size: d_in, the width of the input.
        hidden_size: d, the width of the output in each direction.
        projection_size: p, the width of the attention; d / 4 or d / 8 in the paper.
        num_layers: layers, each reading the output of the one before.
        bias: False: the gates' biases stay at their first values.
        batch_first: input and output are (B, T, ...), not (T, B, ...). As in `nn.LSTM`, states have the layer first
            either way.
        dropout: on what W3 reads, ordinary dropout; and one mask a row, shared over time, on what the highway of each
            layer but the last adds to its input.
        bidirectional: a second recurrence a layer runs from the end of each row; attention sees both sides.
        num_heads: attention heads; must divide p.
        attention_every: attention in every k-th layer only. With k = 5 of 10 layers the paper loses next to nothing.
        attention_last: attention in the last n layers only.
        attention_window: W: a position attends to itself and to the W real positions before it, and the state
            remembers W positions. None: to all that came before, and the state grows with the text.
        attention_dropout: on the attention map.
        project_input_first: where the input is not as wide as the output, one matrix brings it there before the first
            layer, which then needs no fourth part of u.
        variational_dropout: one mask a row, shared over time, on the input of each layer's W1.
        device: where the parameters are created.
        dtype: of the parameters.
        layer_norm, projection_layer_norm, normalize_memory, highway_bias, rescale, activation, skip, alpha_init,
            weight_c_init: see `SRUppCell`.

    Raises:
        ValueError: a size below 1, a probability outside [0, 1), p not divisible by the heads, both attention_every and
            attention_last, attention_window with bidirectional.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        projection_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        num_heads: int = 1,
        attention_every: int = 1,
        attention_last: int | None = None,
        attention_window: int | None = None,
        attention_dropout: float = 0.0,
        project_input_first: bool = False,
        layer_norm: LayerNormPlace = "none",
        projection_layer_norm: bool = True,
        normalize_memory: bool = True,
        highway_bias: float = -2.0,
        rescale: bool = False,
        activation: Activation = "identity",
        skip: bool = True,
        alpha_init: float = 0.0,
        variational_dropout: float = 0.0,
        weight_c_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, project_input_first
        )
        check_sizes(attention_every=attention_every)
        if attention_window is not None:
            check_sizes(attention_window=attention_window)
            if bidirectional:
                raise ValueError("attention_window looks back only: it does not go with bidirectional=True")
        if attention_last is not None:
            if attention_every != 1:
                raise ValueError("attention_every and attention_last exclude each other: give one of them")
            if not 0 <= attention_last <= num_layers:
                raise ValueError(f"attention_last must be between 0 and num_layers={num_layers}, got {attention_last}")
        self.projection_size = projection_size
        self.attention_window = attention_window

        def attends(i: int) -> bool:
            return (i + 1) % attention_every == 0 if attention_last is None else num_layers - i <= attention_last

        self.layers = nn.ModuleList(
            SRUppCell(
                self.layer_input_size(i),
                hidden_size,
                projection_size,
                num_heads=num_heads,
                attention=attends(i),
                dropout=dropout,
                attention_dropout=attention_dropout,
                bidirectional=bidirectional,
                bias=bias,
                layer_norm=layer_norm,
                projection_layer_norm=projection_layer_norm,
                normalize_memory=normalize_memory,
                highway_bias=highway_bias,
                rescale=rescale,
                activation=activation,
                skip=skip,
                alpha_init=alpha_init,
                highway_dropout=self.layer_dropout(i),
                variational_dropout=variational_dropout,
                weight_c_init=weight_c_init,
            )
            for i in range(num_layers)
        )
        self.reset_parameters()
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        input: Tensor | PackedSequence,
        state: SRUppState | Tensor | None = None,
        *,
        mask: Tensor | WindowMask | None = None,
        memory: Sequence[Tensor | None] | None = None,
        padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, SRUppState]:
        """Read a batch of texts, or go on reading them.

        Args:
            input: (T, B, d_in), (B, T, d_in) with `batch_first`, (T, d_in) for a single text, or a PackedSequence.
            state: as an earlier call returned it, or c alone, (layers * D, B, d); None: nothing came before.
            mask: who may attend to whom, in place of the causal or windowed default: see `SRUppCell`. Padding and
                resets are respected beside it.
            memory: for each layer its inputs at the M positions before, (B, M, width), in place of the state's.
            padding_mask: bool, the input's shape without its last dimension; true at padding.
            memory_padding_mask: (B, M) bool, true where `memory` does not count.
            resets: bool, the input's shape without its last dimension; true where a document starts.

        Returns:
            output in the form of the input, D*d wide, zeros at padding; state, each row's own last one.

        Raises:
            ValueError: a shape or device that does not fit.
            TypeError: a dtype that does not fit.
        """
        batch, x = self.read(input, padding_mask, resets)
        if not isinstance(state, SRUppState):
            state = None if state is None else SRUppState(state)
        c0s = self.split_state(None if state is None else state.c, batch)
        before = self._memory(state, memory, memory_padding_mask)
        if mask is None and self.attention_window is not None:
            mask = before.window_mask(self.attention_window, batch)

        cs: list[Tensor] = []
        inputs: list[Tensor | None] = []
        for layer, c0, m in zip(self.layers, c0s, before.layers, strict=True):
            # What the first layer reads is the caller's, who may write into it later.
            inputs.append((x.clone() if x is batch.x else x) if layer.attention else None)
            x, c, _ = layer(
                x,
                c0,
                memory=m,
                mask=mask,
                padding_mask=batch.padding_mask,
                memory_padding_mask=before.forgotten,
                resets=batch.resets,
            )
            cs.append(c)
        after = before.append(inputs, batch, self.attention_window)
        remembers = any(m is not None for m in after.layers)
        return batch.restore(x), SRUppState(
            self.join_state(cs, batch), after.layers if remembers else None, after.forgotten if remembers else None
        )

    def _memory(
        self, state: SRUppState | None, memory: Sequence[Tensor | None] | None, memory_padding_mask: Tensor | None
    ) -> Memory:
        """What was given, or what the state holds, for the layers with attention."""
        if memory is None and memory_padding_mask is not None:
            raise ValueError("memory_padding_mask says which positions of memory count: it needs memory")
        if state is not None and state.memory is not None:
            if memory is not None:
                raise ValueError("the state holds a memory of its own: give memory, or the state, or both with state.c")
            memory, memory_padding_mask = state.memory, state.memory_padding_mask
        if memory is None:
            return Memory((None,) * self.num_layers, None)
        if len(memory) != self.num_layers:
            raise ValueError(f"memory must hold one entry a layer, {self.num_layers} of them, got {len(memory)}")
        used = tuple(m if layer.attention else None for m, layer in zip(memory, self.layers, strict=True))
        attending = [m for m, layer in zip(used, self.layers, strict=True) if layer.attention]
        lengths = [None if m is None else m.shape[1] for m in attending]
        if len(set(lengths)) > 1:
            raise ValueError(f"memory must be equally long in each layer with attention, got lengths {lengths}")
        return Memory(used, memory_padding_mask)
