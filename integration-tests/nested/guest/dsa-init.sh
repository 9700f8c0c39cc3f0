#!/busybox sh
# Init of a guest with a DSA: loads its driver, plays what the kernel command line names, powers off. What matters is said in
# lines that begin with "DSA".
/busybox mkdir -p /proc /sys /dev /tmp /run /usr/local/bin
/busybox --install -s /usr/local/bin
export PATH=/usr/local/bin:/usr/bin:/usr/sbin:/usr/libexec/accel-config/test
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
say() { echo "DSA $*"; }
fail() {
    say "failed: $*"
    dmesg | tail -n 60
    poweroff -f
}
trap 'poweroff -f' EXIT
for module in @modules@; do
    options=
    # Linux leaves this device to its own driver unless it is told otherwise.
    [ $module = vfio_pci ] && options=disable_denylist=1
    insmod /modules/$module.ko $options || fail "$module does not load"
done
play=
for word in $(cat /proc/cmdline); do
    case $word in
    play=*) play=${word#play=} ;;
    esac
done
say "kernel $(uname -r)"
[ $play = vfio ] || {
    for n in 1 2 3 4 5 6 7 8 9 10; do
        [ -e /sys/bus/dsa/devices/dsa0 ] && break
        sleep 0.3
    done
    [ -e /sys/bus/dsa/devices/dsa0 ] || fail "idxd has not probed"
    say "device $(cat /sys/bus/dsa/devices/dsa0/gen_cap) $(cat /sys/bus/dsa/devices/dsa0/op_cap)"
}

# configure TYPE NAME DRIVER QUEUE...: dedicated queues.
configure() {
    type=$1 name=$2 driver=$3
    shift 3
    accel-config config-engine dsa0/engine0.0 --group-id=0 || fail "config-engine"
    for queue in "$@"; do
        accel-config config-wq dsa0/$queue --group-id=0 --mode=dedicated --wq-size=16 --priority=10 \
            --max-batch-size=1024 --type="$type" --name="$name" --driver-name="$driver" || fail "config-wq"
    done
    accel-config enable-device dsa0 || fail "enable-device"
    for queue in "$@"; do
        accel-config enable-wq dsa0/$queue || fail "enable-wq"
        say "queue $(cat /sys/bus/dsa/devices/$queue/state)"
    done
}

case $play in
dmatest)
    configure kernel dmaengine dmaengine wq0.0
    channel=$(ls /sys/class/dma)
    say "channel $channel"
    insmod /modules/dmatest.ko timeout=5000 iterations=20 channel="${channel%% *}" run=1 || fail "dmatest"
    cat /sys/module/dmatest/parameters/wait >/dev/null
    say "summary $(dmesg | grep 'dmatest: .*summary' | sed 's/.*summary //')"
    rmmod dmatest || fail "dmatest does not go"
    accel-config disable-wq dsa0/wq0.0 || fail "disable-wq"
    say "afterwards $(cat /sys/bus/dsa/devices/wq0.0/state)"
    # The device stays on: Linux 6.12.95 follows a null pointer when one without an event log is disabled.
    ;;
sva)
    configure user "dsa test" user wq0.0
    say "node $(ls /dev/dsa)"
    # test NAME OPTION...: one of Intel's, on a dedicated queue (-w 0), without UMWAIT (0x2).
    run() {
        name=$1
        shift
        if dsa_test -w 0 -t 5000 -d dsa0/wq0.0 "$@" >/tmp/log 2>&1; then
            say "passed $name"
        else
            say "not passed $name: $?"
            tail -n 15 /tmp/log
        fi
    }
    run noop -o 0x0 -f 0x2
    run drain -o 0x2 -f 0x2
    run "batch of noops" -o 0x1 -b 0x0 -c 16 -f 0x2
    # Each operation on pages that are there (0x8), in a batch of them, and on pages that may be missing.
    operations="memmove:0x3 fill:0x4 compare:0x5 compval:0x6 create-delta:0x7 apply-delta:0x8 dualcast:0x9"
    operations="$operations crc:0x10 copy-crc:0x11 flush:0x20"
    blocks="dif-check:0x12 dif-insert:0x13 dif-strip:0x14 dif-update:0x15"
    for operation in $operations $blocks; do
        what=${operation%%:*} code=${operation##*:}
        for length in 4096 65536; do
            run "$what $length" -l $length -o $code -f 0xa
        done
        run "batch of $what" -l 4096 -o 0x1 -b $code -c 16 -f 0xa
        run "$what that faults" -l 65536 -o $code -f 0x2
    done
    # Of 512, 520 and 4,104 bytes; 4,096 are above.
    for operation in $blocks; do
        for length in 1536 1560 8208; do
            run "${operation%%:*} $length" -l $length -o ${operation##*:} -f 0xa
        done
    done
    ;;
driver | vfio)
    # run PROGRAM TEST: one of this project's.
    run() {
        start=$(date +%s)
        if "$1" --exact "$2" --nocapture >/tmp/log 2>&1; then
            say "passed $2, after $(($(date +%s) - start)) s"
        else
            say "not passed $2: $?"
            tail -n 30 /tmp/log
        fi
    }
    ;;
esac
case $play in
driver)
    configure user "dsa driver" user wq0.0 wq0.1
    export DSA_NODE=/dev/dsa/wq0.0 DSA_NODES=/dev/dsa/wq0.0,/dev/dsa/wq0.1
    run verifiers real_pages_are_merged_through_device_nodes
    run conformance it_conforms_through_a_device_node
    ;;
vfio)
    for device in /sys/bus/pci/devices/*; do
        [ "$(cat $device/vendor)" = 0x8086 ] && [ "$(cat $device/device)" = 0x0b25 ] && break
    done
    echo vfio-pci >$device/driver_override
    echo ${device##*/} >/sys/bus/pci/drivers_probe
    say "driver $(readlink $device/driver)"
    export DSA_NODE=$device
    run conformance it_conforms_through_a_device_node
    run verifiers real_pages_are_merged_through_vfio
    ;;
esac
say done
poweroff -f
