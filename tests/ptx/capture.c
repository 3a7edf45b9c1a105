// SPDX-License-Identifier: Apache-2.0
// Stands in for the CUDA and tvm-ffi runtimes behind an exported CuTe DSL launcher: a launch is handed to a
// callback in place of a device.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  uint32_t grid[3], block[3];
  size_t dynamic_shared_bytes;
  void *stream;
  struct {
    int32_t id, pad;
    uint32_t value[16];
  } *attributes;
  uint32_t num_attributes;
} LaunchConfig;

enum { CLUSTER_DIMENSION = 4, MAX_SHARED_OPTIN = 97 };

static void (*on_launch)(const char *name, const uint32_t *grid, const uint32_t *block, const uint32_t *cluster,
                         uint64_t dynamic_shared_bytes, void **parameters);
static char error[4096], names[64][1024];
static int num_names;

void capture_set_callback(void *callback) { on_launch = callback; }
const char *capture_error(void) { return error; }

int _cudaLaunchKernelEx(const LaunchConfig *config, const char *kernel, void **parameters) {
  uint32_t cluster[3] = {1, 1, 1};
  for (uint32_t i = 0; i < config->num_attributes; ++i)
    if (config->attributes[i].id == CLUSTER_DIMENSION) memcpy(cluster, config->attributes[i].value, sizeof cluster);
  on_launch(kernel, config->grid, config->block, cluster, config->dynamic_shared_bytes, parameters);
  return 0;
}

int _cudaLibraryLoadData(void **library, const void *image) {
  *library = (void *)image;
  return 0;
}

int _cudaLibraryGetKernel(const char **kernel, void *library, const char *name) {
  if (num_names == 64 || strlen(name) >= sizeof names[0]) return 1;
  *kernel = strcpy(names[num_names++], name);
  return 0;
}

int _cudaGetDevice(int *device) {
  *device = 0;
  return 0;
}
int _cudaSetDevice(int device) { return device; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == MAX_SHARED_OPTIN ? 227 * 1024 : 0;
  return 0;
}
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  *value = 0;
  return 0;
}
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }

int cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int), void *fail) {
  if (*library) return 0;
  int code = init(library);
  return code ? code : load(library, 0);
}
void cuda_dialect_unload_library_once(void **library) {}

void *TVMFFIEnvGetStream(int device_type, int device) { return NULL; }
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  snprintf(error, sizeof error, "%s: %s", kind, message);
}
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int count) {
  size_t used = (size_t)snprintf(error, sizeof error, "%s: ", kind);
  for (int i = 0; i < count && used < sizeof error; ++i)
    if (parts[i]) used += (size_t)snprintf(error + used, sizeof error - used, "%s", parts[i]);
}
void CuteDSLRT_TVMFFISetRaisedCudaError(int code) { snprintf(error, sizeof error, "CUDA error %d", code); }
