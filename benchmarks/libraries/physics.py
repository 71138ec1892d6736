"""MuJoCo XLA, JAX-MD, Dinosaur: simulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program

_FALLING = """
<mujoco>
  <option timestep="0.005" iterations="2" ls_iterations="4"/>
  <worldbody>
    <geom type="plane" size="5 5 0.1"/>
    <body pos="0 0 0.3"><freejoint/><geom type="sphere" size="0.1"/></body>
    <body pos="0.05 0 0.6"><freejoint/><geom type="sphere" size="0.1"/></body>
  </worldbody>
</mujoco>
"""


def mjx_contacts() -> Program:
    """A step of spheres that fall on a plane and on each other."""
    import mujoco
    from mujoco import mjx

    model = mjx.put_model(mujoco.MjModel.from_xml_string(_FALLING))
    data = jax.vmap(lambda v: mjx.make_data(model).replace(qvel=v))(
        0.1 * jax.random.normal(jax.random.key(0), (8, model.nv))
    )

    def step(data):
        return jax.vmap(mjx.step, (None, 0))(model, data)

    return step, (data,)


def jax_md_nvt() -> Program:
    """A step of soft spheres at constant temperature, with Nose-Hoover chains."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(10.0)
    potential = energy.soft_sphere_pair(displacement)
    init, apply = simulate.nvt_nose_hoover(potential, shift, 1e-3, kT=0.5)
    r = jax.random.uniform(jax.random.key(0), (64, 3)) * 10.0
    return apply, (init(jax.random.PRNGKey(0), r),)


def dinosaur_shallow_water() -> Program:
    """A step of the shallow-water equations on the sphere."""
    from dinosaur import (
        coordinate_systems,
        layer_coordinates,
        scales,
        shallow_water,
        spherical_harmonic,
        time_integration,
    )

    coords = coordinate_systems.CoordinateSystem(
        spherical_harmonic.Grid.T21(), layer_coordinates.LayerCoordinates(2)
    )
    specs = shallow_water.ShallowWaterSpecs.from_si(
        densities=[0.8, 1.0] * scales.WATER_DENSITY, scale=scales.DEFAULT_SCALE
    )
    equation = shallow_water.ShallowWaterEquations(
        coords,
        specs,
        jnp.zeros(coords.horizontal.modal_shape),
        jnp.ones(2),
    )
    step = time_integration.imex_rk_sil3(equation, 0.01)
    shape = coords.modal_shape
    mask = coords.horizontal.mask
    draw = 1e-3 * jax.random.normal(jax.random.key(0), (3, *shape)) * mask
    return step, (shallow_water.State(*draw),)
