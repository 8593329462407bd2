// The device that the stand-in runtime reports.
#pragma once

int emulated_compute_capability();  // 80, 90, 100
int emulated_max_smem();            // opt-in bytes a thread block
void prepare_settings();            // reads the environment, fills in the compute capability
