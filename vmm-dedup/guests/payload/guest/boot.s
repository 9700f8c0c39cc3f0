# From the PVH entry (32-bit, no paging) to guest_main at CPL3, and the way back to CPL0 for the few things
# that need it. CPL0 is slow where KVM emulates it, so there is little code here and none of it is per page.
#
# A call from CPL3 is a one-byte `out dx, al`, which always traps (#GP), with r9 = TRAP_MAGIC and r8 = operation:
#   0  out dx, al        3  write rcx bytes at rsi to COM1
#   1  in al, dx         4  sleep for eax ticks of the local APIC timer, or until a device interrupts
#   2  out dx, ax        5  halt for ever
#   6  out dx, eax       7  in eax, dx
# Any other trap at CPL3 continues in guest_fault(vector, error code, rip, cr2).

.set TRAP_MAGIC, 0x50564831
.set APIC, 0xfee00000
.set VECTORS, 48
.set TIMER_VECTOR, 32
.set DEVICE_VECTOR, 33

.section .note.pvh, "a", @note
.balign 4
    .long 4, 8, 18
    .asciz "Xen"
    .quad pvh_start

.section .text.boot, "ax", @progbits
.code32
.global pvh_start
pvh_start:
    cli
    cld
    mov esp, offset trap_stack_top
    mov dword ptr [start_info_address], ebx

    mov eax, offset tss                 # the TSS descriptor holds its base in pieces
    mov word ptr [gdt_tss + 2], ax
    shr eax, 16
    mov byte ptr [gdt_tss + 4], al
    mov byte ptr [gdt_tss + 7], ah

    mov edi, offset idt
    mov eax, offset trap_stubs
    mov ecx, VECTORS
1:  mov word ptr [edi], ax
    mov word ptr [edi + 2], 0x08
    mov word ptr [edi + 4], 0x8e00
    mov edx, eax
    shr edx, 16
    mov word ptr [edi + 6], dx
    add edi, 16
    add eax, 16
    dec ecx
    jnz 1b

    mov al, 0xff                        # the 8259 stays silent, firmware may have left it open
    out 0x21, al
    out 0xa1, al

    mov eax, cr4
    or eax, 0x620                       # PAE, OSFXSR, OSXMMEXCPT
    mov cr4, eax
    mov eax, offset page_map
    mov cr3, eax
    mov ecx, 0xc0000080                 # EFER.LME
    rdmsr
    or eax, 0x100
    wrmsr
    mov eax, cr0
    and eax, 0x9ffffff3                 # caches on, no FPU emulation
    or eax, 0x80000022                  # PG, NE, MP
    mov cr0, eax
    lgdt [gdt_pointer]
    .byte 0xea                          # far jump
    .long long_mode
    .word 0x08

.code64
long_mode:
    mov ax, 0x10
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov ax, 0x28
    ltr ax
    lidt [idt_pointer]

    mov eax, APIC + 0xf0                # on, spurious vector 47
    mov dword ptr [rax], 0x12f
    mov eax, APIC + 0x350               # LINT0 masked
    mov dword ptr [rax], 0x10000
    mov eax, APIC + 0x3e0               # timer: divide by 16
    mov dword ptr [rax], 3
    mov eax, APIC + 0x320               # periodic, so that a tick missed before hlt comes again
    mov dword ptr [rax], 0x20000 + TIMER_VECTOR

    mov eax, 0x40000000                 # the hypervisor's timing leaf; at CPL3 cpuid may answer for the host
    cpuid
    sub eax, 0x40000010
    cmp eax, 0xf0
    jae 1f
    mov eax, 0x40000010
    cpuid
    mov dword ptr [hypervisor_tsc_khz], eax
1:
    push 0x1b
    push offset user_stack_top - 8
    push 2
    push 0x23
    push offset guest_main
    iretq

.balign 16
trap_stubs:
.set vector, 0
.rept VECTORS
    .balign 16
    .if (vector == 8) | ((vector >= 10) & (vector <= 14)) | (vector == 17) | (vector == 21)
    .else
    push 0
    .endif
    push vector
    jmp trap
    .set vector, vector + 1
.endr

.balign 16
trap:
    cmp qword ptr [rsp], 13
    jne 2f
    cmp r9, TRAP_MAGIC
    jne 3f
    cmp r8d, 1
    jb op_out8
    je op_in8
    cmp r8d, 3
    jb op_out16
    je op_write
    cmp r8d, 5
    jb op_sleep
    je 1f
    cmp r8d, 7
    jb op_out32
    je op_in32
1:  cli
    hlt
    jmp 1b

2:  cmp qword ptr [rsp], TIMER_VECTOR
    jb 3f
    cmp qword ptr [rsp], DEVICE_VECTOR
    jne 4f
    inc qword ptr [device_interrupts]
4:  push rax
    mov eax, APIC + 0xb0                # end of interrupt
    mov dword ptr [rax], 0
    pop rax
    add rsp, 16
    iretq

3:  pop rdi
    pop rsi
    mov rdx, [rsp]
    mov rcx, cr2
    mov qword ptr [rsp], offset guest_fault
    mov qword ptr [rsp + 8], 0x23
    mov qword ptr [rsp + 16], 2
    mov qword ptr [rsp + 24], offset user_stack_top - 8
    mov qword ptr [rsp + 32], 0x1b
    iretq

op_out8:
    out dx, al
    jmp trap_done
op_in8:
    in al, dx
    jmp trap_done
op_out16:
    out dx, ax
    jmp trap_done
op_out32:
    out dx, eax
    jmp trap_done
op_in32:
    in eax, dx
    jmp trap_done
op_write:
    mov edx, 0x3fd
    mov edi, 10000                      # a stuck transmitter loses bytes, it does not hang the guest
1:  in al, dx
    test al, 0x20
    jnz 2f
    dec edi
    jnz 1b
2:  mov edx, 0x3f8
    mov al, [rsi]
    out dx, al
    inc rsi
    dec rcx
    jnz op_write
    jmp trap_done
op_sleep:
    mov edx, APIC + 0x380
    mov dword ptr [rdx], eax
    sti
    hlt
    cli
    mov dword ptr [rdx], 0
trap_done:
    add rsp, 16
    inc qword ptr [rsp]                 # past the trapping byte
    iretq

.section .data.boot, "aw", @progbits
.balign 4096
.global page_map
page_map:
    .quad page_directories + 7
    .fill 511, 8, 0
page_directories:
    .quad pages_4g + 0x0007, pages_4g + 0x1007, pages_4g + 0x2007, pages_4g + 0x3007
    .fill 508, 8, 0
pages_4g:                               # 2 MiB each: present, writable, user
.set page, 0
.rept 2048
    .quad page * 0x200000 + 0x87
    .set page, page + 1
.endr
.balign 16
gdt:
    .quad 0
    .quad 0x00af9a000000ffff            # 0x08 code
    .quad 0x00cf92000000ffff            # 0x10 data
    .quad 0x00cff2000000ffff            # 0x18 data, CPL3
    .quad 0x00affa000000ffff            # 0x20 code, CPL3
gdt_tss:
    .quad 0x0000890000000067, 0         # 0x28
gdt_pointer:
    .word gdt_pointer - gdt - 1
    .quad gdt
.balign 16
idt_pointer:
    .word VECTORS * 16 - 1
    .quad idt
.balign 16
tss:
    .long 0
    .quad trap_stack_top
    .fill 90, 1, 0
    .word 104                           # no I/O bitmap: every port traps
.global start_info_address
start_info_address:
    .quad 0
.global device_interrupts
device_interrupts:
    .quad 0
.global hypervisor_tsc_khz
hypervisor_tsc_khz:
    .quad 0

.section .bss.boot, "aw", @nobits
.balign 4096
idt:
    .skip VECTORS * 16
.balign 4096
    .skip 4096
trap_stack_top:
    .skip 65536
user_stack_top:
