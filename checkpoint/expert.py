"""One expert's arithmetic, bit for bit that of the family's own experts module in Transformers (`eager`)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from checkpoint import family
from checkpoint.devices.inference import inference
from checkpoint.kernels import EXACT, Linear

Views = dict[str, torch.Tensor]
"""The parameters of one expert, by name: views of the slot that holds its bytes."""
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden [n, H], routing weights [n]) -> [n, H]."""
Product = Callable[[torch.Tensor], torch.Tensor]
"""Rows [n, in] -> [n, out]."""

PROBE_ROWS = (1, 2, 7)
"""A product of one row takes another kernel than one of several."""
_ALIGN = 64
_ROW = 256
"""Values of a row, of which half are gates: whole vectors of a processor, four times unrolled."""


class ExpertArithmetic:
    """Binds the arithmetic of any layer's experts to a slot. Holds shapes only: the model is on the meta device.

    The family's module repeats for each expert what finds its rows: a one-hot mask, `where`, `index_add_`. Its rows are
    known here, so two plain products and the activation between them give the same result in fewer steps. They are used
    where a check, the first time that an expert of a kind is bound, finds them equal to the module bit for bit; else
    the module computes.
    """

    def __init__(self, config_fields: dict[str, Any], dtype: str, linear: Linear = EXACT) -> None:
        config = family.config_from_dict(config_fields)
        model = family.meta_model(config, family.parse_dtype(dtype))
        self._modules = {layer: module for layer, (_, module) in family.experts_modules(model).items()}
        self._kinds = {layer: _kind(one, dict(one.named_parameters())) for layer, one in self._modules.items()}
        self._linear, self._dtype = linear, family.parse_dtype(dtype)
        self._plain: dict[tuple[object, ...], bool] = {}
        """Kind of experts -> whether plain arithmetic equals the module's."""
        self._rowwise: dict[tuple[object, ...], bool] = {}
        """Kind of experts and number of threads -> whether calls can share a computation."""
        self._elementwise: dict[Hashable, bool] = {}
        self._lock = threading.Lock()

    @property
    def kernel(self) -> str:
        """The name of the kernel that multiplies."""
        return self._linear.kernel

    def bind(self, layer: int, views: Views) -> Compute:
        """The expert that `views` hold. Its bytes may change between calls: only the views are bound.

        The first bind of a kind computes some rows with the expert that is there.
        """
        module = self._modules[layer]
        return _bind_plain(module, views, self._linear) if self.is_plain(layer, views) else _bind_module(module, views)

    def bind_products(self, layer: int, product_of: Callable[[str], Product]) -> Compute:
        """The plain arithmetic of a layer's experts, with a product for each of the weight's names, bias included.

        To be used where `is_plain`.
        """
        module = self._modules[layer]
        return _plain(module, product_of(_up(module)), product_of("down_proj"))

    def products(self, layer: int) -> tuple[str, str]:
        """The names of the weights of a layer's experts, in the order of their products."""
        return _up(self._modules[layer]), "down_proj"

    def activation(self, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """What stands between the two products of a layer's experts."""
        return _activation(self._modules[layer])

    def random_rows(self, layer: int, views: Views, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[count, H] and routing weights [count] for a layer's experts, the same each time. Of `views`, see `bind`,
        shapes and dtypes are read."""
        return _random_rows(self._modules[layer], views, count)

    def is_transposed(self, layer: int) -> bool:
        """Whether the layer's experts hold their weights as [in, out]."""
        return bool(self._modules[layer].is_transposed)

    def kind(self, layer: int) -> Hashable:
        """The same for layers whose experts are computed in the same way."""
        return self._kinds[layer]

    def is_plain(self, layer: int, views: Views) -> bool:
        """Whether plain arithmetic computes a layer's experts: not until `views` have held an expert that can tell."""
        module = self._modules[layer]
        kind = _kind(module, views)
        with self._lock:
            if kind not in self._plain:
                check = _Check(module, views) if _has_plain(module, views) else None
                if check is not None and not check.tells:
                    return False
                self._plain[kind] = check is not None and check.matches_plain()
            return self._plain[kind]

    def is_rowwise(self, layer: int, views: Views) -> bool:
        """Whether calls of at most `SHARED_ROWS` rows in all can be computed as one, each row with the bits of its own
        call. The first question about a kind computes some rows with the expert that is there."""
        module = self._modules[layer]
        kind = (*_kind(module, views), torch.get_num_threads())
        if not self.is_plain(layer, views):
            return False
        with self._lock:
            if kind not in self._rowwise:
                self._rowwise[kind] = _is_rowwise(module, views, self._linear)
        return self._rowwise[kind] and self.is_elementwise(layer)

    def is_elementwise(self, layer: int) -> bool:
        """Whether what stands between a layer's products gives a value the same bits wherever in a tensor it is."""
        kind = self.kind(layer)
        with self._lock:
            if kind not in self._elementwise:
                self._elementwise[kind] = is_elementwise(self.activation(layer), self._dtype)
            return self._elementwise[kind]


def _is_rowwise(module: Any, views: Views, linear: Linear) -> bool:
    """The products are compared with sums that show every difference; what stands between them, with random rows."""
    if module.is_transposed:
        return False
    names = (_up(module), "down_proj")
    if not all(linear.is_rowwise(views[name], views.get(f"{name}_bias")) for name in names):
        return False
    compute = _bind_plain(module, views, linear)
    hidden, weights = _random_rows(module, views, max(PROBE_ROWS))
    own = torch.cat([compute(row, weight) for row, weight in zip(hidden.split(1), weights.split(1), strict=True)])
    return all(torch.equal(compute(hidden[:rows], weights[:rows]), own[:rows]) for rows in PROBE_ROWS)


def is_elementwise(activation: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
    """Torch takes another function at the end of a row, and of a thread's share, than before. Of GELU, a few of all
    values of 16 bits differ. These are all compared, of wider ones some: in long rows, and in short ones."""
    if dtype.itemsize == 2:
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        values = torch.randn(1 << 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    rows = values.unsqueeze(1).repeat(1, _ROW)
    with inference():
        whole, end = activation(rows), activation(rows[:, :2])[:, :1]
        return bool(((whole == end) | (whole.isnan() & end.isnan())).all())


def _random_rows(module: Any, views: Views, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, H] and routing weights [count], the same each time."""
    like = views[_up(module)]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, like.shape[0 if module.is_transposed else 1], generator=generator)
    return hidden.to(like), torch.rand(count, generator=generator).to(like)


def _bind_plain(module: Any, views: Views, linear: Linear = EXACT) -> Compute:
    """up -> activation -> down -> routing weight, for an experts module whose structure Transformers declares."""
    return _plain(module, *(_product(module, views, name, linear) for name in (_up(module), "down_proj")))


def _plain(module: Any, up: Product, down: Product) -> Compute:
    activation = _activation(module)

    def compute(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if hidden.data_ptr() % _ALIGN:  # the last bit of a float32 product depends on it
            hidden = hidden.clone()
        output: torch.Tensor = down(activation(up(hidden))) * weights.view(hidden.shape[0], 1)
        return output if output.dtype is hidden.dtype else output.to(hidden.dtype)

    return _inferring(compute)


def _activation(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What stands between the products. The activation function is called without the steps of a module's call."""
    module = copy.copy(module)
    module._modules = dict(module._modules)
    function = module._modules.pop("act_fn", None)
    if function is not None:
        vars(module)["act_fn"] = function.forward
    activation: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate if module.has_gate else module.act_fn
    return activation


def _inferring(compute: Compute) -> Compute:
    """On whatever thread a worker computes. The model's own is in inference mode already."""

    def inferring(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return compute(hidden, weights)
        with inference():
            return compute(hidden, weights)

    return inferring


def _product(module: Any, views: Views, name: str, linear: Linear) -> Product:
    weight, bias = views[name], views.get(f"{name}_bias")
    if not module.is_transposed:
        return linear.bind(weight, bias)
    product = linear.bind_inputs_first(weight)
    return product if bias is None else lambda rows: product(rows) + bias


class _Check:
    """The module's outputs of random rows, to compare with. `tells`: they are finite, and not all zero."""

    def __init__(self, module: Any, views: Views) -> None:
        self._module, self._views = module, views
        like = next(iter(views.values()))
        hidden_size = views[_up(module)].shape[0 if module.is_transposed else 1]
        generator = torch.Generator().manual_seed(0)
        compute = _bind_module(module, views)
        self._cases: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for rows in PROBE_ROWS:
            hidden = torch.randn(rows, hidden_size, generator=generator).to(like)
            weights = torch.rand(rows, generator=generator)
            for routing in {like.dtype, torch.float32}:
                given = weights.to(like.device, routing)
                self._cases.append((hidden, given, compute(hidden, given)))
        self.tells = all(bool(output.isfinite().all() and output.any()) for _, _, output in self._cases)

    def matches_plain(self) -> bool:
        """The plain arithmetic equals it bit for bit."""
        try:
            compute = _bind_plain(self._module, self._views)
            return all(torch.equal(compute(hidden, given), output) for hidden, given, output in self._cases)
        except (AttributeError, RuntimeError, TypeError):  # its activation reads what only the whole module has
            return False


def _has_plain(module: Any, views: Views) -> bool:
    """Whether the parameters are those of two products, and nothing follows these."""
    products = {_up(module), "down_proj"}
    named = products | {f"{name}_bias" for name in products} if module.has_bias else products
    return views.keys() == named and not module.has_post_expert_norm


def _up(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _kind(module: Any, views: Views) -> tuple[object, ...]:
    """The same for experts that are computed in the same way: class, numbers and flags of the module, and shapes."""
    plain_values = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    shapes = tuple((name, tuple(view.shape), view.dtype, view.device) for name, view in sorted(views.items()))
    return (type(module), tuple(sorted(plain_values.items())), shapes)


def _bind_module(layer_module: Any, views: Views) -> Compute:
    """The family's own module, cut to one expert whose parameters are the views."""
    module: Any = copy.copy(layer_module)
    count = family.expert_count(module)
    module._parameters = {
        name: torch.nn.Parameter(view.unsqueeze(0), requires_grad=False) for name, view in views.items()
    }
    for name, value in list(vars(module).items()):
        if isinstance(value, int) and not isinstance(value, bool) and value == count and "expert" in name:
            setattr(module, name, 1)
    module.config = copy.copy(module.config)
    module.config._experts_implementation = "eager"

    def compute(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = hidden.shape[0]
        index = torch.zeros((rows, 1), dtype=torch.int64, device=hidden.device)
        result: torch.Tensor = module(hidden, index, weights.view(rows, 1))
        return result

    return _inferring(compute)
