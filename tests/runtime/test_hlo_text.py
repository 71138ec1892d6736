"""How texts of modules are read."""

from __future__ import annotations

from tapestry_egg.runtime.measure.hlo_text import parse


def test_a_module_whose_attributes_hold_an_equal_sign_is_read_from_its_first_computation() -> None:
    """As meshes are told there. What follows it was read as more of the module's own line."""
    text = (
        'HloModule jit_f, frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["x"=1]>}}\n\n'
        "ENTRY %main (x: f32[4]) -> f32[4] {\n"
        "  %x = f32[4]{0} parameter(0)\n"
        "  ROOT %y = f32[4]{0} negate(%x)\n"
        "}\n"
    )
    assert [i.opcode for i in parse(text).computations["main"].instructions] == [
        "parameter",
        "negate",
    ]
