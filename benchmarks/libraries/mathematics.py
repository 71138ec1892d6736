"""OTT, S2FFT, tinygp, e3nn, GPJax, JAXLie: transport, harmonics, processes, symmetries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import Program


def ott_sinkhorn() -> Program:
    """Entropic optimal transport between two clouds, and its gradient."""
    from ott.geometry import pointcloud
    from ott.solvers import linear

    def cost(x, y):
        return linear.solve(
            pointcloud.PointCloud(x, y, epsilon=0.1), max_iterations=20, min_iterations=20
        ).reg_ot_cost

    x = jax.random.normal(jax.random.key(0), (64, 4))
    y = jax.random.normal(jax.random.key(1), (96, 4)) + 1.0
    return jax.value_and_grad(cost), (x, y)


def s2fft_transforms() -> Program:
    """Spherical harmonic transforms there and back."""
    import s2fft

    def run(f):
        flm = s2fft.forward_jax(f, 16)
        return flm, s2fft.inverse_jax(flm, 16)

    rng = np.random.default_rng(0)
    return run, (jnp.asarray(rng.normal(size=(16, 31)).astype(np.complex64)),)


def tinygp_likelihood() -> Program:
    """The marginal likelihood of a Gaussian process, and its gradient."""
    import tinygp

    def loss(params, x, y):
        kernel = jnp.exp(params["amp"]) * tinygp.kernels.Matern32(jnp.exp(params["scale"]))
        kernel += tinygp.kernels.ExpSineSquared(scale=1.5, gamma=jnp.exp(params["gamma"]))
        gp = tinygp.GaussianProcess(kernel, x, diag=jnp.exp(params["noise"]))
        return -gp.log_probability(y)

    x = jnp.sort(jax.random.uniform(jax.random.key(0), (64,)) * 10.0)
    params = {"amp": 0.0, "scale": 0.1, "gamma": 0.2, "noise": -1.0}
    params = jax.tree.map(jnp.float32, params)
    return jax.value_and_grad(loss), (params, x, jnp.sin(x))


def e3nn_tensor_product() -> Program:
    """An equivariant layer: spherical harmonics, a tensor product, a linear map and a gate."""
    import e3nn_jax as e3nn

    linear = e3nn.flax.Linear("16x0e + 8x0e + 8x1o")

    def features(x, r):
        sh = e3nn.spherical_harmonics([0, 1, 2], e3nn.IrrepsArray("1o", r), True)
        product = e3nn.tensor_product(
            e3nn.IrrepsArray("8x0e + 8x1o", x), sh, filter_ir_out=["0e", "1o"]
        )
        return product

    x = jax.random.normal(jax.random.key(0), (64, 32))
    r = jax.random.normal(jax.random.key(1), (64, 3))
    params = linear.init(jax.random.key(2), features(x, r))

    def layer(params, x, r):
        return e3nn.gate(linear.apply(params, features(x, r))).array

    return layer, (params, x, r)


def gpjax_regression() -> Program:
    """The marginal likelihood of a regression, and its gradient."""
    import gpjax as gpx
    from flax import nnx

    x = jnp.linspace(0.0, 5.0, 48, dtype=jnp.float32)[:, None]
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF())
    posterior = prior * gpx.likelihoods.Gaussian()
    graph, params = nnx.split(posterior)

    def loss(params, x, y):
        model = nnx.merge(graph, params)
        return -gpx.objectives.conjugate_mll(model, gpx.Dataset(X=x, y=y))

    return loss, (params, x, jnp.sin(x))


def jaxlie_alignment() -> Program:
    """Steps of alignment of two clouds on the manifold of rigid motions."""
    import jaxlie

    def residual(pose, a, b):
        return jnp.mean(jnp.sum((pose @ a - b) ** 2, -1))

    def align(a, b):
        def one(pose, _):
            step = jaxlie.manifold.grad(lambda p: residual_all(p, a, b))(pose)
            return jaxlie.manifold.rplus(pose, -0.1 * step), None

        def residual_all(pose, a, b):
            return jnp.mean(jnp.sum((jax.vmap(lambda p: pose.apply(p))(a) - b) ** 2, -1))

        pose, _ = jax.lax.scan(one, jaxlie.SE3.identity(), None, 8)
        return pose.as_matrix()

    a = jax.random.normal(jax.random.key(0), (128, 3))
    return align, (a, a @ jnp.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]).T + 0.2)
