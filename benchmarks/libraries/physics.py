"""MuJoCo XLA, JAX-MD, Dinosaur: simulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program

_PENDULUM = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body pos="0 0 1">
      <joint type="hinge" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
      <body pos="0 0 -0.5">
        <joint type="hinge" axis="0 1 0" damping="0.1"/>
        <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""
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


def _mjx(xml: str, batch: int) -> Program:
    import mujoco
    from mujoco import mjx

    model = mjx.put_model(mujoco.MjModel.from_xml_string(xml))
    data = jax.vmap(lambda v: mjx.make_data(model).replace(qvel=v))(
        0.1 * jax.random.normal(jax.random.key(0), (batch, model.nv))
    )

    def step(data):
        return jax.vmap(mjx.step, (None, 0))(model, data)

    return step, (data,)


def mjx_pendulum() -> Program:
    """A step of many double pendulums."""
    return _mjx(_PENDULUM, 32)


def mjx_contacts() -> Program:
    """A step of spheres that fall on a plane and on each other."""
    return _mjx(_FALLING, 8)


def jax_md_nve() -> Program:
    """Some steps of a Lennard-Jones fluid at constant energy."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(8.0)
    potential = energy.lennard_jones_pair(displacement)
    init, apply = simulate.nve(potential, shift, 1e-3)
    grid = jnp.stack(jnp.meshgrid(*[jnp.arange(6.0)] * 2), -1).reshape(-1, 2) * 1.3
    state = init(jax.random.PRNGKey(0), grid, kT=0.1)

    def steps(state):
        return jax.lax.fori_loop(0, 5, lambda _, s: apply(s), state)

    return steps, (state,)


def jax_md_nvt() -> Program:
    """A step of soft spheres at constant temperature, with Nose-Hoover chains."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(10.0)
    potential = energy.soft_sphere_pair(displacement)
    init, apply = simulate.nvt_nose_hoover(potential, shift, 1e-3, kT=0.5)
    r = jax.random.uniform(jax.random.key(0), (64, 3)) * 10.0
    return apply, (init(jax.random.PRNGKey(0), r),)


def jax_md_minimize() -> Program:
    """Steps of FIRE descent on a packing."""
    from jax_md import energy, minimize, space

    displacement, shift = space.periodic(6.0)
    potential = energy.soft_sphere_pair(displacement)
    init, apply = minimize.fire_descent(potential, shift)
    r = jax.random.uniform(jax.random.key(0), (48, 2)) * 6.0

    def run(r):
        return jax.lax.scan(lambda s, _: (apply(s), potential(s.position)), init(r), None, 8)[1]

    return run, (r,)


def dinosaur_transform() -> Program:
    """Spherical harmonics there and back, a Laplacian and a gradient between."""
    from dinosaur import spherical_harmonic

    grid = spherical_harmonic.Grid.T21()

    def run(x):
        modal = grid.to_modal(x)
        smooth = grid.inverse_laplacian(grid.clip_wavenumbers(modal))
        u, v = grid.cos_lat_grad(smooth)
        return grid.to_nodal(u), grid.to_nodal(v), grid.to_nodal(grid.laplacian(modal))

    return run, (jax.random.normal(jax.random.key(0), (8, *grid.nodal_shape)),)


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
