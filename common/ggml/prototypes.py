"""Every native function the engine calls, as its C prototype.

This text *is* the table of signatures: ffi.py reads the prototypes and declares each function to ctypes from them,
so a signature cannot differ from the prototype beside it. A test compares each one with the headers the wheel
installs, so a wheel with another ABI is noticed by name and not by a crash.

Written as in the headers, without `struct` and export macros. To use another function, add its prototype here.
Knows nothing of libraries or ctypes; read by ffi.py only.
"""

PROTOTYPES = """
// ggml.h
const char * ggml_version(void);
ggml_context * ggml_init(ggml_init_params params);
void ggml_free(ggml_context * ctx);
void ggml_log_set(ggml_log_callback log_callback, void * user_data);
size_t ggml_tensor_overhead(void);
size_t ggml_graph_overhead_custom(size_t size, bool grads);
const char * ggml_type_name(enum ggml_type type);
size_t ggml_type_size(enum ggml_type type);
int64_t ggml_blck_size(enum ggml_type type);
size_t ggml_row_size(enum ggml_type type, int64_t ne);
size_t ggml_nbytes(const ggml_tensor * tensor);
const char * ggml_op_desc(const ggml_tensor * t);
ggml_tensor * ggml_set_name(ggml_tensor * tensor, const char * name);
void ggml_set_input(ggml_tensor * tensor);
void ggml_set_output(ggml_tensor * tensor);
ggml_tensor * ggml_new_tensor_1d(ggml_context * ctx, enum ggml_type type, int64_t ne0);
ggml_tensor * ggml_new_tensor_2d(ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1);
ggml_tensor * ggml_new_tensor_3d(ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1,
    int64_t ne2);
ggml_tensor * ggml_new_tensor_4d(ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1,
    int64_t ne2, int64_t ne3);
ggml_tensor * ggml_view_1d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, size_t offset);
ggml_tensor * ggml_view_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1,
    size_t offset);
ggml_tensor * ggml_view_3d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2,
    size_t nb1, size_t nb2, size_t offset);
ggml_tensor * ggml_view_4d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2,
    int64_t ne3, size_t nb1, size_t nb2, size_t nb3, size_t offset);
ggml_tensor * ggml_reshape_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1);
ggml_tensor * ggml_reshape_3d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t
    ne2);
ggml_tensor * ggml_reshape_4d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t
    ne2, int64_t ne3);
ggml_tensor * ggml_permute(ggml_context * ctx, ggml_tensor * a, int axis0, int axis1, int axis2, int
    axis3);
ggml_tensor * ggml_transpose(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_cont(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_cont_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1);
ggml_tensor * ggml_cpy(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_concat(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, int dim);
ggml_tensor * ggml_add(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_mul(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_scale(ggml_context * ctx, ggml_tensor * a, float s);
ggml_tensor * ggml_rms_norm(ggml_context * ctx, ggml_tensor * a, float eps);
ggml_tensor * ggml_mul_mat(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
bool ggml_prec_set_acc(ggml_tensor * a, enum ggml_prec prec);
ggml_tensor * ggml_out_prod(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_soft_max_ext(ggml_context * ctx, ggml_tensor * a, ggml_tensor * mask, float scale, float
    max_bias);
ggml_tensor * ggml_argmax(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_get_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_set_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c);
ggml_tensor * ggml_rope_ext(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c, int
    n_dims, int mode, int n_ctx_orig, float freq_base, float freq_scale, float ext_factor, float
    attn_factor, float beta_fast, float beta_slow);
ggml_tensor * ggml_rope_multi(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c, int
    n_dims, int sections[GGML_MROPE_SECTIONS], int mode, int n_ctx_orig, float freq_base, float
    freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow);
ggml_tensor * ggml_geglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_swiglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * ggml_silu(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_sigmoid(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_softplus(ggml_context * ctx, ggml_tensor * a);
ggml_tensor * ggml_flash_attn_ext(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
    ggml_tensor * mask, float scale, float max_bias, float logit_softcap);
ggml_tensor * ggml_ssm_conv(ggml_context * ctx, ggml_tensor * sx, ggml_tensor * c);
ggml_tensor * ggml_gated_delta_net(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor *
    v, ggml_tensor * g, ggml_tensor * beta, ggml_tensor * state, int64_t K);
ggml_cgraph * ggml_new_graph_custom(ggml_context * ctx, size_t size, bool grads);
void ggml_build_forward_expand(ggml_cgraph * cgraph, ggml_tensor * tensor);
int ggml_graph_n_nodes(ggml_cgraph * cgraph);
ggml_tensor * ggml_graph_node(ggml_cgraph * cgraph, int i);
void ggml_graph_add_node(ggml_cgraph * cgraph, ggml_tensor * tensor);
size_t ggml_quantize_chunk(enum ggml_type type, const float * src, void * dst, int64_t start, int64_t
    nrows, int64_t n_per_row, const float * imatrix);
bool ggml_quantize_requires_imatrix(enum ggml_type type);
void ggml_threadpool_params_init(ggml_threadpool_params * p, int n_threads);

// ggml-cpu.h
ggml_threadpool * ggml_threadpool_new(ggml_threadpool_params * params);
void ggml_threadpool_free(ggml_threadpool * threadpool);
bool ggml_backend_is_cpu(ggml_backend_t backend);
ggml_cplan ggml_graph_plan(const ggml_cgraph * cgraph, int n_threads, ggml_threadpool * threadpool);
enum ggml_status ggml_graph_compute(ggml_cgraph * cgraph, ggml_cplan * cplan);
int ggml_cpu_has_amx_int8(void);

// ggml-alloc.h
ggml_gallocr_t ggml_gallocr_new(ggml_backend_buffer_type_t buft);
void ggml_gallocr_free(ggml_gallocr_t galloc);
bool ggml_gallocr_reserve(ggml_gallocr_t galloc, ggml_cgraph * graph);
bool ggml_gallocr_alloc_graph(ggml_gallocr_t galloc, ggml_cgraph * graph);
size_t ggml_gallocr_get_buffer_size(ggml_gallocr_t galloc, int buffer_id);
ggml_backend_buffer * ggml_backend_alloc_ctx_tensors_from_buft(ggml_context * ctx,
    ggml_backend_buffer_type_t buft);
size_t ggml_backend_alloc_ctx_tensors_from_buft_size(ggml_context * ctx, ggml_backend_buffer_type_t buft);

// ggml-backend.h
const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size);
size_t ggml_backend_buft_get_alignment(ggml_backend_buffer_type_t buft);
size_t ggml_backend_buft_get_max_size(ggml_backend_buffer_type_t buft);
bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t buft);
void ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
void * ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer);
size_t ggml_backend_buffer_get_size(ggml_backend_buffer_t buffer);
bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buffer);
void ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value);
void ggml_backend_buffer_set_usage(ggml_backend_buffer_t buffer, enum ggml_backend_buffer_usage usage);
const char * ggml_backend_name(ggml_backend_t backend);
void ggml_backend_free(ggml_backend_t backend);
ggml_backend_buffer_type_t ggml_backend_get_default_buffer_type(ggml_backend_t backend);
void ggml_backend_tensor_set(ggml_tensor * tensor, const void * data, size_t offset, size_t size);
void ggml_backend_tensor_get(const ggml_tensor * tensor, void * data, size_t offset, size_t size);
void ggml_backend_tensor_set_2d(ggml_tensor * tensor, const void * data, size_t offset, size_t size, size_t
    n_copies, size_t stride_tensor, size_t stride_data);
void ggml_backend_tensor_get_2d(const ggml_tensor * tensor, void * data, size_t offset, size_t size, size_t
    n_copies, size_t stride_tensor, size_t stride_data);
void ggml_backend_tensor_memset(ggml_tensor * tensor, uint8_t value, size_t offset, size_t size);
void ggml_backend_synchronize(ggml_backend_t backend);
enum ggml_status ggml_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph);
bool ggml_backend_supports_op(ggml_backend_t backend, const ggml_tensor * op);
ggml_backend_dev_t ggml_backend_get_device(ggml_backend_t backend);
const char * ggml_backend_dev_name(ggml_backend_dev_t device);
const char * ggml_backend_dev_description(ggml_backend_dev_t device);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
void ggml_backend_dev_get_props(ggml_backend_dev_t device, ggml_backend_dev_props * props);
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t device, const char * params);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
ggml_backend_buffer_t ggml_backend_dev_buffer_from_host_ptr(ggml_backend_dev_t device, void * ptr,
    size_t size, size_t max_tensor_size);
bool ggml_backend_dev_supports_op(ggml_backend_dev_t device, const ggml_tensor * op);
const char * ggml_backend_reg_name(ggml_backend_reg_t reg);
void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
ggml_backend_dev_t ggml_backend_dev_by_type(enum ggml_backend_dev_type type);
void ggml_backend_load_all_from_path(const char * dir_path);
enum ggml_status ggml_backend_tensor_alloc(ggml_backend_buffer_t buffer, ggml_tensor * tensor, void *
    addr);
ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void * ptr, size_t size);

// gguf.h
gguf_context * gguf_init_from_file(const char * fname, gguf_init_params params);
void gguf_free(gguf_context * ctx);
uint32_t gguf_get_version(const gguf_context * ctx);
size_t gguf_get_alignment(const gguf_context * ctx);
size_t gguf_get_data_offset(const gguf_context * ctx);
int64_t gguf_get_n_kv(const gguf_context * ctx);
const char * gguf_get_key(const gguf_context * ctx, int64_t key_id);
enum gguf_type gguf_get_kv_type(const gguf_context * ctx, int64_t key_id);
enum gguf_type gguf_get_arr_type(const gguf_context * ctx, int64_t key_id);
const void * gguf_get_val_data(const gguf_context * ctx, int64_t key_id);
const char * gguf_get_val_str(const gguf_context * ctx, int64_t key_id);
size_t gguf_get_arr_n(const gguf_context * ctx, int64_t key_id);
const void * gguf_get_arr_data(const gguf_context * ctx, int64_t key_id);
const char * gguf_get_arr_str(const gguf_context * ctx, int64_t key_id, size_t i);
int64_t gguf_get_n_tensors(const gguf_context * ctx);
size_t gguf_get_tensor_offset(const gguf_context * ctx, int64_t tensor_id);
const char * gguf_get_tensor_name(const gguf_context * ctx, int64_t tensor_id);
const int64_t * gguf_get_tensor_ne(const gguf_context * ctx, int64_t tensor_id);
enum ggml_type gguf_get_tensor_type(const gguf_context * ctx, int64_t tensor_id);
size_t gguf_get_tensor_size(const gguf_context * ctx, int64_t tensor_id);
"""
