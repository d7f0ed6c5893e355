"""The report that GPU tests compare with is read right; its elements are those of drivers 470 and 580."""

from __future__ import annotations

from tests.gpu.nvidia_smi import parse

_R580 = """<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>580.159.04</driver_version><attached_gpus>1</attached_gpus>
<gpu id="00000000:1B:00.0"><product_name>NVIDIA H200</product_name><uuid>GPU-a</uuid>
<gpu_recovery_action>Drain and Reset</gpu_recovery_action><pci><pci_bus_id>00000000:1B:00.0</pci_bus_id></pci>
<clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
<clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
<clocks_event_reason_sw_thermal_slowdown>Active</clocks_event_reason_sw_thermal_slowdown></clocks_event_reasons>
<ecc_errors><volatile><sram_correctable>1</sram_correctable>
<sram_uncorrectable_parity>2</sram_uncorrectable_parity><sram_uncorrectable_secded>3</sram_uncorrectable_secded>
<dram_correctable>4</dram_correctable><dram_uncorrectable>5</dram_uncorrectable></volatile>
<aggregate><sram_correctable>10</sram_correctable><sram_uncorrectable_parity>20</sram_uncorrectable_parity>
<sram_uncorrectable_secded>30</sram_uncorrectable_secded><dram_correctable>40</dram_correctable>
<dram_uncorrectable>50</dram_uncorrectable><sram_threshold_exceeded>Yes</sram_threshold_exceeded></aggregate>
<aggregate_uncorrectable_sram_sources><sram_l2>50</sram_l2></aggregate_uncorrectable_sram_sources></ecc_errors>
<remapped_rows><remapped_row_corr>6</remapped_row_corr><remapped_row_unc>7</remapped_row_unc>
<remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure></remapped_rows>
</gpu></nvidia_smi_log>"""


def test_every_value_of_a_present_driver_is_read():
    (said,) = parse(_R580).values()
    assert (said.uuid, said.bus, said.model, said.driver) == (
        "GPU-a", "00000000:1B:00.0", "NVIDIA H200", "580.159.04",
    )  # fmt: skip
    assert said.ecc == {
        ("volatile", "correctable"): 5, ("volatile", "uncorrectable"): 10,
        ("aggregate", "correctable"): 50, ("aggregate", "uncorrectable"): 100,
    }  # fmt: skip
    assert (said.sram_exceeded, said.remap_pending, said.remap_failed) == (True, True, False)
    assert said.remapped == {"correctable": 6, "uncorrectable": 7}
    assert said.recovery_action == "drain_and_reset"
    assert {reason for reason, active in said.throttles.items() if active} == {"sw_power_cap", "sw_thermal"}
    assert None not in said.throttles.values()


def test_what_an_older_driver_does_not_say_is_unknown():
    older = """<nvidia_smi_log><driver_version>470.57.02</driver_version><gpu id="0"><uuid>GPU-b</uuid>
    <clocks_throttle_reasons><clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
    </clocks_throttle_reasons><ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile>
    </ecc_errors><remapped_rows>N/A</remapped_rows></gpu></nvidia_smi_log>"""
    (said,) = parse(older).values()
    assert said.throttles["hw_slowdown"]
    assert said.throttles["sw_thermal"] is None
    assert set(said.ecc.values()) == {None}
    assert set(said.remapped.values()) == {None}
    assert (said.sram_exceeded, said.remap_pending, said.recovery_action) == (None, None, None)
