// A stand-in for CUDA's driver: graphs, modules and mapped memory of one process, all on the host.
// Addresses are those of the host, so that two processes can be told to use the same ones.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
typedef uint64_t u64;
typedef struct { char* image; char* variable; } Module;
typedef struct { Module* module; char name[256]; int attribute[16]; } Function;
typedef struct { u64 function; unsigned grid[3], block[3], shared; void **params, **extra; u64 kernel, context; } Kernel;
typedef struct { int type; Kernel kernel; unsigned char plain[200]; u64 attribute[20][8]; void* child; } Node;
typedef struct { Node* nodes[64]; size_t count; Node *from[64], *to[64]; u64 data[64]; size_t edges; } Graph;
static struct { u64 begin, size; int type; } spans[256];
static int span_count;
const size_t layout[3][2] = {{0, 8}, {8, 8}, {16, 4}};
enum { VARIABLE = 64 };

static void know(u64 begin, u64 size, int type) { spans[span_count].begin = begin; spans[span_count].size = size; spans[span_count++].type = type; }
static void forget(u64 begin) { for (int i = 0; i < span_count; i++) if (spans[i].begin == begin) spans[i].size = 0; }
void double_know(u64 begin, u64 size, int type) { know(begin, size, type); }

int cuGetErrorName(int status, const char** text) { (void)status; *text = "CUDA_ERROR_OF_THE_DOUBLE"; return 0; }
int cuCtxGetCurrent(u64* context) { *context = 1; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { *mode = 0; return 0; }
int cuPointerGetAttribute(u64* value, int kind, u64 address) {
  for (int i = 0; i < span_count; i++)
    if (spans[i].begin <= address && address < spans[i].begin + spans[i].size) {
      *value = kind == 2 ? (u64)spans[i].type : kind == 11 ? spans[i].begin : spans[i].size;
      return 0;
    }
  return 1;
}
int cuMemcpyDtoH_v2(void* to, u64 from, size_t size) { memcpy(to, (void*)from, size); return 0; }
int cuMemcpyHtoD_v2(u64 to, void* from, size_t size) { memcpy((void*)to, from, size); return 0; }
int cuMemGetAllocationGranularity(size_t* size, void* wanted, int option) { (void)wanted; (void)option; *size = 2 << 20; return 0; }
int cuMemAddressReserve(u64* got, size_t size, size_t align, u64 address, u64 flags) {
  (void)align; (void)flags;
  int common = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* at = mmap((void*)address, size, PROT_NONE, common | (address ? MAP_FIXED_NOREPLACE : 0), -1, 0);
  if (at == MAP_FAILED) at = mmap(0, size, PROT_NONE, common, -1, 0);
  if (at == MAP_FAILED) return 2;
  *got = (u64)at;
  return 0;
}
int cuMemAddressFree(u64 address, size_t size) {
  for (int i = 0; i < span_count; i++)  // mapped
    if (spans[i].size && spans[i].type == 2 && spans[i].begin - address < size) return 1;
  return munmap((void*)address, size) ? 1 : 0;
}
// A handle of memory is a file in memory: one more than its descriptor.
int cuMemCreate(u64* handle, size_t size, void* wanted, u64 flags) {
  (void)wanted; (void)flags;
  int file = memfd_create("double", 0);
  if (file < 0 || ftruncate(file, size)) return 2;
  *handle = file + 1;
  return 0;
}
int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
  (void)flags;
  int how = PROT_READ | PROT_WRITE;
  if (mmap((void*)address, size, how, MAP_SHARED | MAP_FIXED, handle - 1, offset) == MAP_FAILED) return 1;
  know(address, size, 2);
  return 0;
}
int cuMemSetAccess(u64 address, size_t size, void* access, size_t count) { (void)address; (void)size; (void)access; (void)count; return 0; }
int cuMemUnmap(u64 address, size_t size) { forget(address); return mmap((void*)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED; }
int cuMemRelease(u64 handle) { return close(handle - 1) ? 1 : 0; }
int cuMemExportToShareableHandle(int* descriptor, u64 handle, int kind, u64 flags) {
  if (kind != 1 || flags) return 1;
  *descriptor = dup(handle - 1);
  return *descriptor < 0;
}
int cuMemImportFromShareableHandle(u64* handle, u64 descriptor, int kind) {
  int file = kind == 1 ? dup((int)descriptor) : -1;
  *handle = file + 1;
  return file < 0 ? 999 : 0;
}
int cuModuleLoadData(Module** module, const char* image) {
  if (memcmp(image, "\177ELF", 4)) return 200;
  *module = calloc(1, sizeof **module);
  (*module)->variable = calloc(1, VARIABLE);
  return 0;
}
int cuModuleUnload(Module* module) { free(module->variable); free(module); return 0; }
int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  *function = calloc(1, sizeof **function);
  (*function)->module = module;
  strncpy((*function)->name, name, 255);
  return 0;
}
int cuModuleGetGlobal_v2(u64* address, size_t* size, Module* module, const char* name) {
  if (strcmp(name, "table")) return 500;
  *address = (u64)module->variable;
  *size = VARIABLE;
  return 0;
}
int cuFuncGetModule(Module** module, Function* function) { *module = function->module; return 0; }
int cuFuncGetName(const char** name, Function* function) { *name = function->name; return 0; }
int cuFuncGetAttribute(int* value, int number, Function* function) { *value = function->attribute[number]; return 0; }
int cuFuncSetAttribute(Function* function, int number, int value) { function->attribute[number] = value; return 0; }
int cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
  (void)function;
  if (index >= 3) return 1;
  *offset = layout[index][0];
  *size = layout[index][1];
  return 0;
}
int cuKernelGetFunction(u64* function, u64 kernel) { *function = kernel; return 0; }
int cuGraphCreate(Graph** graph, unsigned flags) { (void)flags; *graph = calloc(1, sizeof **graph); return 0; }
int cuGraphDestroy(Graph* graph) { (void)graph; return 0; }
int cuGraphGetNodes(Graph* graph, Node** nodes, size_t* count) { *count = graph->count; if (nodes) memcpy(nodes, graph->nodes, sizeof(Node*) * graph->count); return 0; }
int cuGraphGetEdges_v2(Graph* graph, Node** from, Node** to, u64* data, size_t* count) {
  if (*count > graph->edges) *count = graph->edges;
  for (size_t i = 0; i < *count && i < graph->edges; i++) { from[i] = graph->from[i]; to[i] = graph->to[i]; data[i] = graph->data[i]; }
  return 0;
}
int cuGraphAddDependencies_v2(Graph* graph, Node** from, Node** to, u64* data, size_t count) {
  for (size_t i = 0; i < count; i++) { graph->from[graph->edges] = from[i]; graph->to[graph->edges] = to[i]; graph->data[graph->edges++] = data[i]; }
  return 0;
}
int cuGraphNodeGetType(Node* node, int* type) { *type = node->type; return 0; }
int cuGraphChildGraphNodeGetGraph(Node* node, void** graph) { *graph = node->child; return 0; }
static int add(Node** node, Graph* graph, int type) {
  *node = calloc(1, sizeof **node);
  (*node)->type = type;
  graph->nodes[graph->count++] = *node;
  return 0;
}
int cuGraphAddKernelNode_v2(Node** node, Graph* graph, Node** before, size_t count, Kernel* kernel) {
  (void)before; (void)count;
  add(node, graph, 0);
  (*node)->kernel = *kernel;
  if (kernel->params) {
    (*node)->kernel.params = calloc(3, sizeof(void*));
    for (int i = 0; i < 3; i++) memcpy((*node)->kernel.params[i] = calloc(1, 8), kernel->params[i], layout[i][1]);
  }
  return 0;
}
int cuGraphKernelNodeGetParams_v2(Node* node, Kernel* kernel) { *kernel = node->kernel; return 0; }
int cuGraphKernelNodeGetAttribute(Node* node, int number, u64* value) { memcpy(value, node->attribute[number], 64); return 0; }
int cuGraphKernelNodeSetAttribute(Node* node, int number, u64* value) { memcpy(node->attribute[number], value, 64); return 0; }
int cuGraphMemcpyNodeGetParams(Node* node, void* plain) { memcpy(plain, node->plain, 200); return 0; }
int cuGraphMemsetNodeGetParams(Node* node, void* plain) { memcpy(plain, node->plain, 40); return 0; }
int cuGraphAddMemcpyNode(Node** node, Graph* graph, Node** before, size_t count, void* plain, u64 context) { (void)before; (void)count; (void)context; add(node, graph, 1); memcpy((*node)->plain, plain, 200); return 0; }
int cuGraphAddMemsetNode(Node** node, Graph* graph, Node** before, size_t count, void* plain, u64 context) { (void)before; (void)count; (void)context; add(node, graph, 2); memcpy((*node)->plain, plain, 40); return 0; }
int cuGraphAddEmptyNode(Node** node, Graph* graph, Node** before, size_t count) { (void)before; (void)count; return add(node, graph, 5); }
int cuGraphAddChildGraphNode(Node** node, Graph* graph, Node** before, size_t count, Graph* child) { (void)before; (void)count; add(node, graph, 4); (*node)->child = child; return 0; }
int double_host_node(Node** node, Graph* graph) { return add(node, graph, 3); }
