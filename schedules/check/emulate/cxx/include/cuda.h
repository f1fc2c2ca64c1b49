// Stands in for the CUDA header of this name: emulator.h, which has CUtensorMap, is included before every kernel.
#pragma once
