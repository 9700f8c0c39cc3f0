/*
 * MOVDIR64B [RAX], [RDX] for QEMU's emulator, which does not have it.
 *
 * Where the instruction stands, the emulator would raise an exception for an invalid opcode. Before it does, this plugin reads
 * the 64 bytes, writes them to the destination, and goes on behind the instruction. It cannot raise a page fault: of a page that
 * is not there, source or destination, it leaves the instruction to the emulator. So programs touch both before.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* QEMU's plugin interface, version 7 (QEMU 11), as far as it is used here; its header is in no package. */
typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_plugin_register;
typedef struct qemu_info_t qemu_info_t;
typedef void (*vcpu_udata_cb)(unsigned int vcpu, void *userdata);
typedef void (*tb_trans_cb)(struct qemu_plugin_tb *tb, void *userdata);
enum { CALLBACK_CHANGES_PC = 3, HWADDR_OPERATION_OK = 0 };
/* The beginning of a descriptor; its size is the array's. */
struct register_descriptor {
    struct qemu_plugin_register *handle;
    const char *name;
};
/* GLib's, which QEMU is linked with. */
typedef struct { char *data; unsigned int len; } GArray;
typedef struct { uint8_t *data; unsigned int len; } GByteArray;

void qemu_plugin_register_vcpu_init_cb(qemu_plugin_id_t id, vcpu_udata_cb cb, void *userdata);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, tb_trans_cb cb, void *userdata);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, vcpu_udata_cb cb, int flags, void *userdata);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *insn, void *to, size_t len);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
GArray *qemu_plugin_get_registers(void);
int qemu_plugin_read_register(struct qemu_plugin_register *handle, GByteArray *to);
bool qemu_plugin_read_memory_vaddr(uint64_t address, GByteArray *to, size_t len);
bool qemu_plugin_translate_vaddr(uint64_t address, uint64_t *hwaddr);
int qemu_plugin_write_memory_hwaddr(uint64_t hwaddr, GByteArray *from);
void qemu_plugin_set_pc(uint64_t pc);
GByteArray *g_byte_array_new(void);
GByteArray *g_byte_array_set_size(GByteArray *array, unsigned int len);
unsigned int g_array_get_element_size(GArray *array);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 7;

enum { CPUS = 16, BYTES = 64, PAGE = 4096 };
static const uint8_t INSTRUCTION[] = {0x66, 0x0f, 0x38, 0xf8, 0x02};
/* The emulator may give up decoding before the last byte. */
enum { DECODED = 4 };

static struct {
    struct qemu_plugin_register *rax, *rdx, *rip;
    GByteArray *bytes;
} cpus[CPUS];

static uint64_t value(unsigned int cpu, struct qemu_plugin_register *of)
{
    GByteArray *bytes = g_byte_array_set_size(cpus[cpu].bytes, 0);
    uint64_t number = 0;
    qemu_plugin_read_register(of, bytes);
    memcpy(&number, bytes->data, bytes->len < sizeof(number) ? bytes->len : sizeof(number));
    return number;
}

static bool is_instruction_at(unsigned int cpu, uint64_t address)
{
    GByteArray *bytes = g_byte_array_set_size(cpus[cpu].bytes, 0);
    return qemu_plugin_read_memory_vaddr(address, bytes, sizeof(INSTRUCTION)) &&
           memcmp(bytes->data, INSTRUCTION, sizeof(INSTRUCTION)) == 0;
}

/* Code is translated once for all addresses that it is mapped at, and RIP is that of the block's beginning or of some
 * instruction of it: so it tells the page, and what was translated the offset in it. */
static uint64_t own_address(unsigned int cpu, uint64_t translated)
{
    uint64_t page = value(cpu, cpus[cpu].rip) & ~(uint64_t)(PAGE - 1);
    uint64_t offset = translated & (PAGE - 1);
    for (int step = 0; step < 2; step++) {
        uint64_t address = page + (uint64_t)step * PAGE + offset;
        if (is_instruction_at(cpu, address)) {
            return address;
        }
    }
    return 0;
}

static void execute(unsigned int cpu, void *translated)
{
    if (cpu >= CPUS || !cpus[cpu].rip) {
        return;
    }
    uint64_t pc = own_address(cpu, (uint64_t)translated);
    uint64_t to = value(cpu, cpus[cpu].rax), from = value(cpu, cpus[cpu].rdx), physical;
    GByteArray *bytes = g_byte_array_set_size(cpus[cpu].bytes, 0);
    if (!pc || to % BYTES != 0 || !qemu_plugin_translate_vaddr(to, &physical) ||
        !qemu_plugin_read_memory_vaddr(from, bytes, BYTES) ||
        qemu_plugin_write_memory_hwaddr(physical, bytes) != HWADDR_OPERATION_OK) {
        fprintf(stderr, "movdir64b: pc %#lx, from %#lx to %#lx cannot be done\n", pc, from, to);
        return;
    }
    qemu_plugin_set_pc(pc + sizeof(INSTRUCTION));
}

static void translate(struct qemu_plugin_tb *tb, void *userdata)
{
    (void)userdata;
    for (size_t at = 0; at < qemu_plugin_tb_n_insns(tb); at++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, at);
        uint8_t bytes[DECODED] = {0};
        if (qemu_plugin_insn_data(insn, bytes, DECODED) == DECODED && memcmp(bytes, INSTRUCTION, DECODED) == 0) {
            void *address = (void *)qemu_plugin_insn_vaddr(insn);
            qemu_plugin_register_vcpu_insn_exec_cb(insn, execute, CALLBACK_CHANGES_PC, address);
        }
    }
}

static void begin(unsigned int cpu, void *userdata)
{
    (void)userdata;
    if (cpu >= CPUS) {
        return;
    }
    GArray *all = qemu_plugin_get_registers();
    unsigned int size = g_array_get_element_size(all);
    cpus[cpu].bytes = g_byte_array_new();
    for (unsigned int at = 0; at < all->len; at++) {
        const struct register_descriptor *one = (const void *)(all->data + (size_t)at * size);
        if (strcmp(one->name, "rax") == 0) {
            cpus[cpu].rax = one->handle;
        } else if (strcmp(one->name, "rdx") == 0) {
            cpus[cpu].rdx = one->handle;
        } else if (strcmp(one->name, "rip") == 0) {
            cpus[cpu].rip = one->handle;
        }
    }
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv)
{
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_init_cb(id, begin, NULL);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translate, NULL);
    return 0;
}
