"""The flat array of parameters: where each part lies, what lies between, and which groups decay."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kbench.train.layout import GROUP, Layout
from kbench.train.model import PRESETS, Model

# 33 channels: no vector fills a group, no matrix whole ones; 128 and 64: some do, with no gap at all.
MODELS = {
    "odd": Model(3, 3, 33, vocab=300, context=17),
    "tiny": Model(1, 1, 1, vocab=1, context=1),
    "even": Model(2, 2, 128, vocab=256, context=64),
    "nano": PRESETS["nano"],
}


@pytest.fixture(params=list(MODELS))
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout(MODELS[request.param])


def weights_of(model: Model, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """All elements different from 0, and hardly any two alike."""
    source = np.random.default_rng(5)
    return {p.name: (source.normal(0, 1, p.shape) + 10).astype(dtype) for p in model.parameters}


def owners(layout: Layout) -> np.ndarray:
    """For each element of the flat array the number of its part, -1 between parts."""
    found = np.full(layout.count, -1)
    for number, part in enumerate(layout.parts):
        place = slice(part.offset, part.offset + part.count)
        assert np.all(found[place] == -1), f"{part.parameter.name} of layer {part.layer} overlaps another"
        found[place] = number
    return found


def test_every_part_begins_at_a_multiple_of_the_group_and_none_overlaps(layout: Layout) -> None:
    assert GROUP == 128, "256 bytes in 16 bits"
    assert all(part.offset % GROUP == 0 for part in layout.parts) and layout.count % GROUP == 0
    assert np.count_nonzero(owners(layout) >= 0) == layout.model.parameter_count
    assert len(layout.parts) == sum(p.slices for p in layout.model.parameters)
    # Nothing is wasted but what alignment needs.
    gaps = layout.count - layout.model.parameter_count
    assert 0 <= gaps < GROUP * len(layout.parts)


def test_parts_stand_in_the_order_of_files(layout: Layout) -> None:
    order = [(p.name, layer) for p in layout.model.parameters for layer in range(p.slices)]
    assert [(part.parameter.name, part.layer) for part in layout.parts] == order
    offsets = [layout.offset(name, layer) for name, layer in order]
    assert offsets == sorted(offsets) == [part.offset for part in layout.parts] and offsets[0] == 0


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_packing_and_unpacking_give_the_same_bits(layout: Layout, dtype: type) -> None:
    weights = weights_of(layout.model, dtype)
    flat = layout.pack(weights, np.dtype(dtype))
    assert flat.shape == (layout.count,) and flat.dtype == dtype
    back = layout.unpack(flat)
    assert list(back) == [p.name for p in layout.model.parameters]
    for name, array in weights.items():
        assert back[name].dtype == dtype and back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes(), name


def test_layers_lie_one_after_the_other_within_a_tensor(layout: Layout) -> None:
    weights = weights_of(layout.model)
    flat = layout.pack(weights, np.dtype(np.float32))
    for part in layout.parts:
        whole = weights[part.parameter.name]
        expected = whole[part.layer] if part.parameter.layered else whole
        assert np.array_equal(flat[part.offset : part.offset + part.count], expected.reshape(-1))


def test_what_lies_between_parts_is_0_and_is_not_read(layout: Layout) -> None:
    weights, between = weights_of(layout.model), owners(layout) == -1
    flat = layout.pack(weights, np.dtype(np.float32))
    assert np.all(flat[between] == 0.0) and np.all(flat[~between] != 0.0)
    flat[between] = np.nan
    assert all(np.array_equal(values, weights[name]) for name, values in layout.unpack(flat).items())


def test_unpacked_arrays_are_copies(layout: Layout) -> None:
    flat = layout.pack(weights_of(layout.model), np.dtype(np.float32))
    before = flat.copy()
    for values in layout.unpack(flat).values():
        values[...] = 0.0
    assert np.array_equal(flat, before)


def test_matrices_and_embeddings_decay_and_vectors_do_not(layout: Layout) -> None:
    decays = layout.decays(0.25)
    assert decays.shape == (layout.count // GROUP,) and decays.dtype == np.float32
    each, of = np.repeat(decays, GROUP), owners(layout)
    for number, part in enumerate(layout.parts):
        right = 0.25 if part.parameter.name in ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw") else 0.0
        assert np.all(each[of == number] == right), (part.parameter.name, part.layer)
    assert not np.any(layout.decays(0.0))


def test_a_layer_that_is_not_there_has_no_offset() -> None:
    layout = Layout(MODELS["odd"])
    for name, layer in (("ln1w", 3), ("lnfw", 1), ("nothing", 0)):
        with pytest.raises(KeyError):
            layout.offset(name, layer)
