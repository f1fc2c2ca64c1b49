// Stands in for the CUDA header of this name: emulator.h is included before every kernel.
#pragma once
