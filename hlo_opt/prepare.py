"""`hlo_opt.jit(f, parameters=…)`: parameters are prepared once, steps take what was prepared.

What is prepared depends on the graph, and the graph on the other arguments: it is made at the
first step. The step itself is a `jax.jit` of a function that, while JAX traces it, exports `f`,
runs the pipeline and calls the rewritten `@main`; caches, donation and dispatch are JAX's own.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, tree_util
from jaxlib.mlir import ir

from hlo_opt import compat
from hlo_opt.api import REMARKS, Jitted, for_target, name_of
from hlo_opt.errors import HloOptError
from hlo_opt.ir.module import parse
from hlo_opt.ir.prepared import (
    PARAMETER,
    argument_attributes,
    keep_results,
    prepare_function,
    set_argument_attributes,
    split,
)
from hlo_opt.ir.signature import ArrayType, array_types, main_function
from hlo_opt.pipeline import PassContext, run_pipeline
from hlo_opt.remarks import Remark
from hlo_opt.targets import is_tpu, target_of_device


@dataclass(frozen=True)
class _Variant:
    """What the pipeline made of the function for one signature.

    Attributes:
      digest: tells what has to be prepared apart.
      values: types of the prepared values.
      sources: for every prepared value the parameter it is, or None where it is computed.
      prepare: from the parameters to the computed values.
      main: from `(values, other arrays)` to the function's result.
    """

    digest: str
    values: tuple[ArrayType, ...]
    sources: tuple[int | None, ...]
    prepare: export.Exported
    main: export.Exported
    remarks: tuple[Remark, ...]


@dataclass(frozen=True, eq=False)
class _Key:
    """What a step is traced for besides its arguments; compared by identity, which is fast.

    Attributes:
      digest: which values are passed; empty before any are.
      target: what kernels are for.
      platform: JAX's name of what it is lowered for; None for its default.
      tree, avals: the parameters.
    """

    digest: str
    target: str | None
    platform: str | None
    tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]


@tree_util.register_pytree_node_class
class _View:
    """The prepared values of one variant, as JAX sees them in the place of the parameters."""

    def __init__(self, key: _Key, values: Sequence[Any]) -> None:
        self.key = key
        self.values = values

    def tree_flatten(self) -> tuple[Sequence[Any], _Key]:
        return self.values, self.key

    @classmethod
    def tree_unflatten(cls, key: _Key, values: Sequence[Any]) -> _View:
        return cls(key, values)


class _OtherVariant(Exception):
    """A trace found that other values than those passed are needed."""

    def __init__(self, variant: _Variant) -> None:
        super().__init__("other prepared values are needed")
        self.variant = variant


# The variant of the step that is being traced again with the values it needs.
_KNOWN: contextvars.ContextVar[_Variant | None] = contextvars.ContextVar("known", default=None)


@dataclass(eq=False)
class Prepared:
    """Parameters of one `hlo_opt.jit` function; made by its `prepare`, taken by its calls.

    The arrays a step needs are made at the first step, once for all signatures that need the same.
    """

    _owner: object = field(repr=False)
    _name: str
    _tree: Any = field(repr=False)
    _leaves: tuple[Any, ...] | None = field(repr=False)
    _avals: tuple[jax.ShapeDtypeStruct, ...] = field(repr=False)
    _device: Any
    _values: dict[str, list[Any]] = field(default_factory=dict, repr=False)
    _chosen: dict[Any, str] = field(default_factory=dict, repr=False)
    _views: dict[tuple[str, str | None], _View] = field(default_factory=dict, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def release(self) -> None:
        """Lets go of the original parameters, to free their memory.

        Signatures that were stepped before, and others that need the same values, still work.

        Raises:
          HloOptError: there was no step yet.
        """
        if not self._values:
            raise HloOptError(f"error: '{self._name}' cannot be released before the first step")
        self._leaves = None

    def _placed(self) -> Any:
        """The sharding of shapes that say where they will be (a topology's device)."""
        for leaf in self._leaves or ():
            if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
                return leaf.sharding
        return None

    def _digest(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Which values to pass: a guess that a trace corrects."""
        if len(self._values) < 2:
            return next(iter(self._values), "")
        for signature in _signatures(args, kwargs):
            if signature in self._chosen:
                return self._chosen[signature]
        return next(iter(self._values))

    def _make(self, variant: _Variant) -> None:
        """Runs `@prepare` unless its values are there."""
        with self._lock:
            if variant.digest in self._values:
                return
            if self._leaves is None:
                raise HloOptError(
                    f"error: these arguments need '{self._name}' prepared in another way, and the "
                    "originals were released: prepare them again"
                )
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self._leaves):
                raise HloOptError(
                    f"error: '{self._name}' was prepared from shapes: it can be lowered, not called"
                )
            leaves = list(self._leaves)
            with jax.ensure_compile_time_eval():
                computed = iter(_run(variant, leaves))
                values = [next(computed) if s is None else leaves[s] for s in variant.sources]
                # On their device for good: with arguments on others JAX refuses the call.
                self._values[variant.digest] = [jax.device_put(v, self._device) for v in values]


def _run(variant: _Variant, leaves: list[Any]) -> list[Any]:
    """What `@prepare` computes."""
    return list(jax.jit(variant.prepare.call)(leaves)) if None in variant.sources else []


def _signatures(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What tells calls apart: with the values of what is no array (static arguments), and without
    (a position that is counted up)."""
    leaves, tree = tree_util.tree_flatten((args, kwargs))
    exact: list[Any] = []
    coarse: list[Any] = []
    for leaf in leaves:
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        kind = (leaf.shape, leaf.dtype) if is_array else type(leaf)
        coarse.append(kind)
        exact.append(kind if is_array or isinstance(leaf, Prepared) else (kind, str(leaf)))
    return (tree, tuple(exact)), (tree, tuple(coarse))


class PreparedJitted(Jitted):
    """A function compiled by JAX after our passes, with parameters that are prepared once."""

    def __init__(
        self,
        fun: Callable[..., Any],
        parameters: str,
        pipeline: str,
        target: str | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__(fun, pipeline, target, options)
        self._fun = fun
        self._name = parameters
        self._place = _place_of(fun, parameters)
        _check_options(parameters, self._place, options)
        self._token = object()
        self._keys: dict[Any, _Key] = {}
        self._variants: dict[Any, _Variant] = {}
        self._seen: tuple[Any, tuple[jax.ShapeDtypeStruct, ...]] | None = None

        @functools.wraps(fun)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            return self._step(args, kwargs)

        self._jitted = jax.jit(stepped, **options)

    def prepare(self, parameters: Any) -> Prepared:
        """Takes the parameters; `self(prepared, …)` then stands for `fun(parameters, …)`.

        Args:
          parameters: a tree of arrays on one device, or of `jax.ShapeDtypeStruct` to lower only.

        Raises:
          HloOptError: not such a tree, or not the one that an earlier step had.
        """
        if isinstance(parameters, Prepared):
            raise HloOptError(f"error: '{self._name}' is prepared already")
        paths, tree = tree_util.tree_flatten_with_path(parameters)
        for path, leaf in paths:
            if not _is_array(leaf):
                kind = getattr(leaf, "dtype", type(leaf).__name__)
                raise HloOptError(f"error: {self._path(path)} is no array of numbers but {kind}")
        leaves = tuple(leaf for _, leaf in paths)
        avals = tuple(
            jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
            for leaf in leaves
        )
        if self._seen is not None:
            self._check_same(*self._seen, tree, avals)
        return Prepared(self._token, self._name, tree, leaves, avals, _device_of(leaves))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        prepared = self._prepared_in(args, kwargs)
        target = target_of_device(prepared._device.platform, prepared._device.device_kind)
        digest = prepared._digest(args, kwargs) or self._known(prepared, target, args, kwargs)
        view = prepared._views.get((digest, target)) or self._view(prepared, digest, target)
        try:
            args_, kwargs_ = self._with(view, args, kwargs)
            return self._jitted(*args_, **kwargs_)
        except _OtherVariant as other:
            variant = other.variant
        prepared._make(variant)
        for signature in _signatures(args, kwargs):
            prepared._chosen[signature] = variant.digest
            self._variants[self._key_of(prepared, "", target), signature] = variant
        args_, kwargs_ = self._with(self._view(prepared, variant.digest, target), args, kwargs)
        known = _KNOWN.set(variant)
        try:
            return self._jitted(*args_, **kwargs_)
        finally:
            _KNOWN.reset(known)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's `Traced`, as of a function of the prepared values; nothing is prepared for it."""
        prepared = self._prepared_in(args, kwargs)
        device = prepared._device
        target = self.target or target_of_device(device.platform, device.device_kind)
        try:
            args_, kwargs_ = self._with(self._view(prepared, "", target), args, kwargs)
            super().trace(*args_, **kwargs_)
        except _OtherVariant as other:
            variant = other.variant
        shapes = [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=prepared._placed())
            for v in variant.values
        ]
        view = _View(self._key_of(prepared, variant.digest, target), shapes)
        args_, kwargs_ = self._with(view, args, kwargs)
        known = _KNOWN.set(variant)
        try:
            return super().trace(*args_, **kwargs_)
        finally:
            _KNOWN.reset(known)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and types of the results."""
        return self.trace(*args, **kwargs).out_info

    def _known(
        self, prepared: Prepared, target: str | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> str:
        """Prepares parameters as others of their types were; empty where there were none."""
        key = self._key_of(prepared, "", target)
        for signature in _signatures(args, kwargs):
            if variant := self._variants.get((key, signature)):
                prepared._make(variant)
                prepared._chosen[signature] = variant.digest
                return variant.digest
        return ""

    def _rewritten(self, lowered: Any) -> Any:
        self._check_platforms(lowered)
        return for_target(lowered, self.target)

    def _prepared_in(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
        """The prepared parameters among the arguments. Raises `HloOptError`."""
        name = self._name
        if name in kwargs:
            prepared = kwargs[name]
        elif self._place is not None and self._place < len(args):
            prepared = args[self._place]
        else:
            raise HloOptError(f"error: the argument '{name}' is missing")
        if not isinstance(prepared, Prepared):
            raise HloOptError(
                f"error: '{name}' is not prepared ({type(prepared).__name__}): pass what "
                f"{name_of(self._fun)}.prepare({name}) returned"
            )
        if prepared._owner is not self._token:
            raise HloOptError(f"error: '{name}' was prepared by another function's prepare")
        if sum(type(value) is Prepared for value in (*args, *kwargs.values())) > 1:
            raise HloOptError(
                f"error: prepared parameters stand for '{name}' alone, once in a call"
            )
        return prepared

    def _with(
        self, value: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments with another value for the parameters."""
        if self._name in kwargs:
            return args, {**kwargs, self._name: value}
        place = self._place
        assert place is not None
        return (*args[:place], value, *args[place + 1 :]), kwargs

    def _view(self, prepared: Prepared, digest: str, target: str | None) -> _View:
        key = (digest, target)
        if key not in prepared._views:
            values = prepared._values.get(digest, [])
            view = _View(self._key_of(prepared, digest, target), values)
            if not digest:
                return view
            prepared._views[key] = view
        return prepared._views[key]

    def _key_of(self, prepared: Prepared, digest: str, target: str | None) -> _Key:
        """The one key for all prepared parameters of these types."""
        platform = _export_platform(target, prepared._device)
        parts = (digest, target, platform, prepared._tree, prepared._avals)
        if digest and self._seen is None:
            self._seen = (prepared._tree, prepared._avals)
        return self._keys.setdefault(parts, _Key(*parts))

    def _step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What JAX traces: a call of the rewritten function."""
        view = kwargs[self._name] if self._name in kwargs else args[self._place or 0]
        args, kwargs = self._with(None, args, kwargs)
        leaves, tree = tree_util.tree_flatten((args, kwargs))
        dynamic = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
        variant = _KNOWN.get()
        if variant is None or variant.digest != view.key.digest:
            variant = self._variant(view.key, leaves, tree, dynamic)
        if variant.digest != view.key.digest:
            raise _OtherVariant(variant)
        return variant.main.call(list(view.values), [leaves[n] for n in dynamic])

    def _variant(
        self, key: _Key, leaves: Sequence[Any], tree: Any, dynamic: Sequence[int]
    ) -> _Variant:
        """Exports the function for the arguments and runs the pipeline. Raises `HloOptError`."""

        @functools.wraps(self._fun)
        def flat(parameters: Sequence[Any], arrays: Sequence[Any]) -> Any:
            values = list(leaves)
            for number, array in zip(dynamic, arrays, strict=True):
                values[number] = array
            args, kwargs = tree_util.tree_unflatten(tree, values)
            whole = tree_util.tree_unflatten(key.tree, parameters)
            args, kwargs = self._with(whole, args, kwargs)
            return self._fun(*args, **kwargs)

        del flat.__wrapped__  # its arguments are not the function's
        arrays = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.aval.weak_type)
            for a in (leaves[n] for n in dynamic)
        ]
        platforms = None if key.platform is None else [key.platform]
        exporting = export.export(jax.jit(flat, keep_unused=True), platforms=platforms)
        try:
            exported = exporting(list(key.avals), arrays)
        except NotImplementedError as error:
            if "host_callbacks" not in str(error):
                raise
            raise HloOptError(
                "error: a function with host callbacks (jax.debug.print and the like) cannot have "
                "prepared parameters"
            ) from None
        if exported.ordered_effects or exported.nr_devices > 1:
            what = "ordered side effects" if exported.ordered_effects else "several devices"
            raise HloOptError(f"error: a function with {what} cannot have prepared parameters")
        module = parse(exported.mlir_module())
        self._name_parameters(module, key)
        # Donation is the step's; the exported function knows nothing of it.
        ctx = PassContext(target=key.target, knows_donation=False)
        rewritten = run_pipeline(module, self.pipeline, ctx)
        if prepare_function(rewritten) is None:
            rewritten = run_pipeline(rewritten, "hoist-weights", ctx)
        REMARKS[self._key] = remarks = tuple(ctx.remarks)
        return _variant_of(exported, rewritten, remarks)

    def _name_parameters(self, module: ir.Module, key: _Key) -> None:
        main = main_function(module)
        numbered = tree_util.tree_unflatten(key.tree, range(len(key.avals)))
        attributes = argument_attributes(main)
        for path, number in tree_util.tree_flatten_with_path(numbered)[0]:
            text = ir.StringAttr.get(self._path(path), module.context)
            attributes[number][PARAMETER] = text
        set_argument_attributes(main, attributes)

    def _path(self, path: Any) -> str:
        return f"{self._name}{tree_util.keystr(path)}"

    def _check_same(self, old_tree: Any, old: Sequence[Any], tree: Any, new: Sequence[Any]) -> None:
        if tree != old_tree:
            raise HloOptError(
                f"error: '{self._name}' has another tree than in an earlier step: {tree}, not "
                f"{old_tree}"
            )
        numbered = tree_util.tree_unflatten(tree, range(len(new)))
        for path, number in tree_util.tree_flatten_with_path(numbered)[0]:
            now, was = new[number], old[number]
            if (now.shape, now.dtype) != (was.shape, was.dtype):
                raise HloOptError(
                    f"error: {self._path(path)} is {now.dtype}{list(now.shape)}, in an earlier "
                    f"step it was {was.dtype}{list(was.shape)}"
                )


def _is_array(leaf: Any) -> bool:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _place_of(fun: Callable[..., Any], name: str) -> int | None:
    """Where an argument stands; None for keyword-only ones. Raises `HloOptError` for none."""
    parameters = inspect.signature(fun).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if name not in parameters or parameters[name].kind in variable:
        raise HloOptError(f"error: parameters='{name}': {name_of(fun)} has no such argument")
    if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
        return None
    return list(parameters).index(name)


def _check_options(name: str, place: int | None, options: dict[str, Any]) -> None:
    """Raises `HloOptError` where the parameters are static or donated."""
    for what in ("static", "donate"):
        numbers, names = options.get(f"{what}_argnums"), options.get(f"{what}_argnames")
        numbers = [numbers] if isinstance(numbers, int) else numbers or ()
        names = [names] if isinstance(names, str) else names or ()
        if name in names or (place is not None and place in numbers):
            verb = {"static": "static", "donate": "donated"}[what]
            raise HloOptError(f"error: parameters='{name}' cannot be {verb}")


def _device_of(leaves: Sequence[Any]) -> Any:
    """The one device of the parameters. Raises `HloOptError` for several."""
    devices = {
        device
        for leaf in leaves
        if (sharding := getattr(leaf, "sharding", None)) is not None
        for device in sharding.device_set
    }
    if len(devices) > 1:
        raise HloOptError(f"error: the parameters are on {len(devices)} devices, not on one")
    return devices.pop() if devices else compat.default_device_object()


def _export_platform(target: str | None, device: Any) -> str | None:
    if is_tpu(target):
        return "tpu"
    if device.platform == jax.default_backend():
        return None
    return "cuda" if device.platform == "gpu" else str(device.platform)


def _variant_of(
    exported: export.Exported, module: ir.Module, remarks: tuple[Remark, ...]
) -> _Variant:
    """The two functions of a prepared module, ready to be called."""
    parts = split(module)
    assert parts is not None
    text = parts.prepare.operation.get_asm()
    sources = keep_results(parts.prepare)
    values = array_types(main_function(parts.main))[0][: parts.count]
    count = len(parts.parameters)
    computed = [v for v, s in zip(values, sources, strict=True) if s is None]
    others = exported.in_avals[count:]
    return _Variant(
        digest=hashlib.sha256(text.encode()).hexdigest(),
        values=tuple(values),
        sources=sources,
        prepare=compat.exported_as(
            exported, parts.prepare, exported.in_avals[:count], ((0,) * count,), computed
        ),
        main=compat.exported_as(
            exported,
            parts.main,
            [*values, *others],
            ((0,) * len(values), (0,) * len(others)),
        ),
        remarks=remarks,
    )
