"""JAX-CFD: incompressible flow on staggered grids, and in spectral space."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def finite_volume() -> Program:
    """Some steps of a decaying flow by finite volumes."""
    import jax_cfd.base as cfd

    grid = cfd.grids.Grid((64, 64), domain=((0, 2 * jnp.pi), (0, 2 * jnp.pi)))
    v0 = cfd.initial_conditions.filtered_velocity_field(jax.random.PRNGKey(0), grid, 2.0, 4)
    step = cfd.equations.semi_implicit_navier_stokes(
        grid=grid, density=1.0, viscosity=1e-3, dt=0.005
    )
    return cfd.funcutils.repeated(step, 4), (v0,)


def spectral() -> Program:
    """Forced turbulence in spectral space."""
    import jax_cfd.base as cfd
    import jax_cfd.spectral as spectral

    grid = cfd.grids.Grid((128, 128), domain=((0, 2 * jnp.pi), (0, 2 * jnp.pi)))
    v0 = cfd.initial_conditions.filtered_velocity_field(jax.random.PRNGKey(1), grid, 2.0, 4)
    vorticity = cfd.finite_differences.curl_2d(v0).data
    step = spectral.time_stepping.crank_nicolson_rk4(
        spectral.equations.ForcedNavierStokes2D(1e-3, grid, smooth=True), 0.002
    )
    return cfd.funcutils.repeated(step, 5), (jnp.fft.rfftn(vorticity),)
