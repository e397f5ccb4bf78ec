/* Stands in for CUDA's driver and runtime where there is no GPU: as much of them as torch asks for before it makes an
 * NCCL group. Nothing is ever launched. All return 0, success; memory is the host's. See check_wheel.py. */
#include <stdlib.h>
#include <string.h>

typedef unsigned long Size;
enum { VERSION = 13000, GPUS = 1, PROPERTIES_BYTES = 1008 };

static int give(int *place, int value) {
    *place = value;
    return 0;
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { return give(version, VERSION); }
int cuDevicePrimaryCtxGetState(int gpu, unsigned *flags, int *active) {
    *flags = 0;
    return give(active, 1);
}
int cudaGetDeviceCount(int *count) { return give(count, GPUS); }
int cudaGetDevice(int *gpu) { return give(gpu, 0); }
int cudaSetDevice(int gpu) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaGetDeviceProperties(char *found, int gpu) {
    memset(found, 0, PROPERTIES_BYTES);
    return 0;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    return give(greatest, -5);
}
int cudaStreamIsCapturing(void *stream, int *status) { return give(status, 0); }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaMalloc(void **place, Size bytes) {
    *place = calloc(1, bytes);
    return 0;
}
int cudaHostAlloc(void **place, Size bytes, unsigned flags) { return cudaMalloc(place, bytes); }
int cudaMemcpyAsync(void *to, const void *from, Size bytes, int kind, void *stream) {
    memcpy(to, from, bytes);
    return 0;
}
