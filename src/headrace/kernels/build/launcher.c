/* One function that launches every kernel whose arguments are numbers, pointers and maps of tensors.

   Triton writes and compiles such a function for each signature; this one reads the signature when it is called, and is compiled once.

   What lives here: numbers from Python to the driver. What may not: which kernel, which arguments (launch.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

#define MOST 128      /* arguments of a kernel */
#define GIVEN 5       /* before a kernel's own arguments: what is launched, the grid, the stream */
#define SCRATCH 2     /* pointers that Triton adds to every kernel; null where it wants none */

typedef struct {
  CUfunction function;
  unsigned int threads, shared;
  int cooperative, dependent;
  Py_ssize_t count;
  char kinds[MOST]; /* 1, 2, 4, 8: bytes of an integer or pointer; f, d: floats; m: a map; _: a constant, which is passed over */
} Kernel;

typedef struct { /* as Triton's module for descriptors has it */
  PyObject_HEAD;
  _Alignas(128) CUtensorMap map;
} MapObject;

static const char *NAME = "headrace.kernel";
static PyObject *map_type = NULL;
static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **) = NULL;
static CUresult (*error_text)(CUresult, const char **) = NULL;
static CUresult (*get_context)(CUcontext *) = NULL;
static CUresult (*set_context)(CUcontext) = NULL;
static CUresult (*get_device)(CUdevice *, int) = NULL;
static CUresult (*retain_context)(CUcontext *, CUdevice) = NULL;

static PyObject *refuse(CUresult status) {
  const char *text = NULL;
  if (error_text(status, &text) != CUDA_SUCCESS || text == NULL) text = "unknown error";
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text);
  return NULL;
}

/* A thread that has done nothing on the device yet has no context. */
static CUresult ensure_context(void) {
  CUcontext context = NULL;
  CUdevice device;
  CUresult status = get_context(&context);
  if (status != CUDA_SUCCESS || context != NULL) return status;
  if ((status = get_device(&device, 0)) != CUDA_SUCCESS) return status;
  if ((status = retain_context(&context, device)) != CUDA_SUCCESS) return status;
  return set_context(context);
}

static void forget(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, NAME)); }

/* describe(function, warps, shared, cooperative, dependent, kinds): what `launch` wants first. */
static PyObject *describe(PyObject *self, PyObject *arguments) {
  unsigned long long function;
  unsigned int warps, shared;
  int cooperative, dependent;
  const char *kinds;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(arguments, "KIIppy#", &function, &warps, &shared, &cooperative, &dependent, &kinds, &count)) return NULL;
  if (count > MOST - SCRATCH) {
    PyErr_Format(PyExc_ValueError, "a kernel of %zd arguments; %d is the most", count, MOST - SCRATCH);
    return NULL;
  }
  Kernel *kernel = PyMem_Calloc(1, sizeof(Kernel));
  if (kernel == NULL) return PyErr_NoMemory();
  kernel->function = (CUfunction)(uintptr_t)function;
  kernel->threads = 32 * warps;
  kernel->shared = shared;
  kernel->cooperative = cooperative;
  kernel->dependent = dependent;
  kernel->count = count;
  memcpy(kernel->kinds, kinds, count);
  return PyCapsule_New(kernel, NAME, forget);
}

/* One argument into 8 bytes, the lowest of which are the kernel's; 0 with an exception where it is of another kind. */
static int convert(char kind, PyObject *given, uint64_t *value, void **place) {
  *place = value;
  if (kind == 'f') {
    float single = (float)PyFloat_AsDouble(given);
    memcpy(value, &single, sizeof single);
  } else if (kind == 'd') {
    double twice = PyFloat_AsDouble(given);
    memcpy(value, &twice, sizeof twice);
  } else if (kind == 'm') {
    if ((PyObject *)Py_TYPE(given) != map_type) {
      PyErr_Format(PyExc_TypeError, "a map of a tensor was expected, not %s", Py_TYPE(given)->tp_name);
      return 0;
    }
    *place = &((MapObject *)given)->map;
  } else {
    *value = PyLong_AsUnsignedLongLongMask(given);
  }
  return PyErr_Occurred() == NULL;
}

/* launch(described, x, y, z, stream, arguments …): nothing where the grid is empty. */
static PyObject *launch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count < GIVEN) {
    PyErr_SetString(PyExc_TypeError, "what is launched, its grid and its stream must be given");
    return NULL;
  }
  const Kernel *kernel = PyCapsule_GetPointer(given[0], NAME);
  if (kernel == NULL) return NULL;
  if (count - GIVEN < kernel->count) {
    PyErr_Format(PyExc_TypeError, "%zd arguments for a kernel of %zd", count - GIVEN, kernel->count);
    return NULL;
  }
  uint64_t values[MOST];
  void *places[MOST];
  int passed = 0;
  for (Py_ssize_t at = 0; at < kernel->count; at++) {
    if (kernel->kinds[at] == '_') continue;
    if (!convert(kernel->kinds[at], given[GIVEN + at], &values[passed], &places[passed])) return NULL;
    passed++;
  }
  uint64_t nothing = 0;
  for (int each = 0; each < SCRATCH; each++) places[passed++] = &nothing;

  CUlaunchAttribute attributes[2];
  CUlaunchConfig config = {0};
  config.gridDimX = (unsigned int)PyLong_AsUnsignedLongMask(given[1]);
  config.gridDimY = (unsigned int)PyLong_AsUnsignedLongMask(given[2]);
  config.gridDimZ = (unsigned int)PyLong_AsUnsignedLongMask(given[3]);
  config.hStream = (CUstream)(uintptr_t)PyLong_AsUnsignedLongLongMask(given[4]);
  if (PyErr_Occurred()) return NULL;
  if (config.gridDimX == 0 || config.gridDimY == 0 || config.gridDimZ == 0) Py_RETURN_NONE;
  config.blockDimX = kernel->threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel->shared;
  config.attrs = attributes;
  memset(attributes, 0, sizeof attributes);
  if (kernel->dependent) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (kernel->cooperative) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
  CUresult status;
  Py_BEGIN_ALLOW_THREADS;
  status = ensure_context();
  if (status == CUDA_SUCCESS) status = launch_kernel(&config, kernel->function, places, NULL);
  Py_END_ALLOW_THREADS;
  if (status != CUDA_SUCCESS) return refuse(status);
  Py_RETURN_NONE;
}

static int find(void *library, const char *name, void *function) {
  void *found = dlsym(library, name);
  if (found == NULL) PyErr_Format(PyExc_ImportError, "the driver's library has no %s", name);
  memcpy(function, &found, sizeof found);
  return found != NULL;
}

static int find_all(void) {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == NULL) {
    PyErr_SetString(PyExc_ImportError, "the driver's library, libcuda.so.1, was not found");
    return 0;
  }
  return find(library, "cuLaunchKernelEx", &launch_kernel) && find(library, "cuGetErrorString", &error_text) &&
         find(library, "cuCtxGetCurrent", &get_context) && find(library, "cuCtxSetCurrent", &set_context) &&
         find(library, "cuDeviceGet", &get_device) && find(library, "cuDevicePrimaryCtxRetain", &retain_context);
}

/* use_maps(type): the type of maps of tensors, which is Triton's. */
static PyObject *use_maps(PyObject *self, PyObject *type) {
  Py_XSETREF(map_type, Py_NewRef(type));
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"describe", describe, METH_VARARGS, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {"use_maps", use_maps, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "headrace_launcher", NULL, -1, functions};

PyMODINIT_FUNC PyInit_headrace_launcher(void) { return find_all() ? PyModule_Create(&module) : NULL; }
