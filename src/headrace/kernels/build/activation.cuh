// Activations, as kernels/norm/triton_activation.py numbers them. Given from outside: KIND.
__device__ __forceinline__ float act(float x) {
  if (KIND == 0) return __fdividef(x, 1.0f + __expf(-x));
  if (KIND == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  return __fdividef(x, 1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}
