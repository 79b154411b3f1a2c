"""`shapes`, the synthetic data set that needs no file."""

import functools

import numpy as np


@functools.cache
def shapes(train=10_000, test=2_000, size=32, seed=0):
    """Returns synthetic images of ten shapes with random place, size, angle, colours, background,
    noise: disc, ring, square, triangle, plus, star, crescent, two discs, bars, half disc. Colour
    is independent of the class."""
    rng = np.random.default_rng([seed, 2026])
    n = train + test
    label = np.concatenate([rng.permutation(np.arange(m) % 10) for m in (train, test)])

    def uniform(low, high, *shape):
        return rng.uniform(low, high, (n, *shape)).astype(np.float32)

    axis = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    radius, angle = uniform(0.5, 0.8, 1, 1), uniform(-0.5, 0.5, 1, 1)
    right, down = uniform(-0.25, 0.25, 1, 1), uniform(-0.25, 0.25, 1, 1)
    ground, tilt = uniform(0.0, 0.6, 1, 1, 3), uniform(-0.2, 0.2, 2, 3)
    lighter = uniform(0.0, 0.6, 1, 1, 3)
    noise = rng.standard_normal((n, size, size, 3), dtype=np.float32)
    loud = uniform(0.02, 0.15, 1, 1, 1)

    def f32(function, *z):  # NumPy's own of float32 differs between CPUs in the last bit
        return function(*(np.float64(x) for x in z)).astype(np.float32)

    def disc(u, v, r):
        return r - np.sqrt(u * u + v * v)

    def box(u, v, a, b):
        return np.minimum(a - np.abs(u), b - np.abs(v))

    inside = (  # positive inside of the shape, about a distance to its outline
        lambda u, v: disc(u, v, 0.9),
        lambda u, v: 0.2 - np.abs(disc(u, v, 0.75)),
        lambda u, v: box(u, v, 0.75, 0.75),
        lambda u, v: 0.5 - np.maximum(-v, np.abs(u) * 0.866 + v * 0.5),
        lambda u, v: np.maximum(box(u, v, 0.28, 0.95), box(u, v, 0.95, 0.28)),
        lambda u, v: 0.65 + 0.3 * f32(np.cos, 5 * f32(np.arctan2, v, u)) - np.sqrt(u * u + v * v),
        lambda u, v: np.minimum(disc(u, v, 0.95), -disc(u - 0.45, v, 0.75)),
        lambda u, v: np.maximum(disc(u - 0.5, v, 0.42), disc(u + 0.5, v, 0.42)),
        lambda u, v: np.maximum.reduce([box(u + x, v, 0.17, 0.8) for x in (-0.62, 0.62, 0)]),
        lambda u, v: np.minimum(disc(u, v + 0.4, 0.95), v + 0.4),
    )

    def draw(i):
        x, y = axis[None, None, :] - right[i], axis[None, :, None] - down[i]
        # the shape's own axes, in which it has about the size 1
        cos, sin = f32(np.cos, angle[i]), f32(np.sin, angle[i])
        u, v = (x * cos + y * sin) / radius[i], (y * cos - x * sin) / radius[i]
        depth = np.empty_like(u)
        for c, shape in enumerate(inside):
            depth[label[i] == c] = shape(u[label[i] == c], v[label[i] == c])
        # a soft outline, one pixel wide
        cover = np.clip(depth * radius[i] * size / 2 + 0.5, 0, 1)[..., None]
        back = (ground[i] + axis[None, :, None, None] * tilt[i, None, None, 0]
                + axis[None, None, :, None] * tilt[i, None, None, 1])
        colour = back.mean((1, 2), keepdims=True) + lighter[i]  # any hue, lighter than the ground
        light = np.clip(back + cover * (colour - back) + noise[i] * loud[i], 0, 1)
        return (light * 255).astype(np.uint8)

    images = np.concatenate([draw(slice(i, i + 250)) for i in range(0, n, 250)])  # faster in parts
    return images[:train], label[:train], images[train:], label[train:]
