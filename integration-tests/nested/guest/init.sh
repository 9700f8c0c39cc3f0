#!/busybox sh
# Init of a guest: starts the workload that the kernel command line names, then does what it is told on the console.
export PATH=/usr/local/bin:/usr/bin:/usr/sbin
/busybox mkdir -p /proc /sys /dev /run /tmp /usr/local/bin /var/log/nginx /var/lib/nginx /data
/busybox --install -s /usr/local/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in virtio_blk vsock vmw_vsock_virtio_transport_common vmw_vsock_virtio_transport; do
    [ ! -e /modules/$module.ko ] || insmod /modules/$module.ko
done
ip link set lo up
# Whoever asks meanwhile reads the old number or the new one.
note_progress() {
    echo "$1" >/run/progress.new && mv /run/progress.new /run/progress
}
note_progress 0

# What each workload does again and again; a round counts when all of it has worked.
web() {
    for file in bin/python3.13 sbin/nginx lib/x86_64-linux-gnu/libc.so.6; do
        wget -q -O - "http://127.0.0.1/$file" | cmp -s - "/usr/$file" || return 1
    done
}
db() {
    redis-benchmark -q -t set,get -n 100 -c 2 -r 2000 -d 512 >/dev/null || return 1
    [ "$(redis-cli set canary "$1")" = OK ] && [ "$(redis-cli get canary)" = "$1" ]
}
python() { python3.13 -S /etc/guest/work.py "$1"; }
# Files of 256 KiB, the same in all guests at first; one is rewritten each round, in place.
writer() {
    name=/data/$(($1 % 16))
    fill "$name" "$1 of $(cat /run/name)" && check "$name"
}
idle() { sleep 1; }
fill() {
    yes "$2" | head -c 262144 | dd of="$1" bs=262144 iflag=fullblock conv=notrunc 2>/dev/null &&
        yes "$2" | head -c 262144 | sha256sum | cut -d' ' -f1 >"$1.sum"
}
check() { [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$(cat "$1.sum")" ]; }

work() {
    round=0
    while round=$((round + 1)); do
        "$workload" "$round" && note_progress "$round" || echo "L2 round $round of $workload FAILED"
        sleep 0.2
    done
}

workload=idle
for word in $(cat /proc/cmdline); do
    case $word in
    workload=*) workload=${word#workload=} ;;
    name=*) echo "${word#name=}" >/run/name ;;
    esac
done
case $workload in
web) nginx -c /etc/guest/nginx.conf ;;
db)
    redis-server --save '' --bind 127.0.0.1 --daemonize yes --logfile /run/redis.log
    until redis-cli ping >/dev/null 2>&1; do sleep 0.2; done
    ;;
writer)
    n=0
    while [ $n -lt 16 ]; do
        fill /data/$n "file $n as it was"
        n=$((n + 1))
    done
    ;;
esac
work &
worker=$!

echo "L2 ready: $(nproc) CPUs, $workload, $(uname -r)"
while read -r command argument; do
    case $command in
    progress) echo "L2 progress $(cat /run/progress)" ;;
    verify)
        # All that was written must be there; what the system came with must be as it came.
        kill $worker 2>/dev/null
        wait $worker
        bad=0
        for sum in /data/*.sum; do
            [ ! -e "$sum" ] || check "${sum%.sum}" || bad=$((bad + 1))
        done
        sha256sum -c -s /etc/guest/sums || bad=$((bad + 1))
        echo "L2 verified, $bad bad"
        ;;
    rewrite)
        # Every file anew, in place: all sharing of them breaks.
        kill $worker 2>/dev/null
        wait $worker
        echo "L2 rewrites"
        n=0
        while [ $n -lt 16 ]; do
            [ ! -e /data/$n ] || fill /data/$n "file $n of $(cat /run/name) for $argument"
            n=$((n + 1))
        done
        echo "L2 rewrote $argument"
        ;;
    read)
        # All files of the disk.
        mkdir -p /files
        mount -t ext4 -o ro,noload /dev/vda /files && cat /files/[0-9] >/dev/null && echo "L2 read all"
        ;;
    agent)
        mkdir -p /run/vmm-dedup-agent
        vmm-dedup-agent >/run/agent.log 2>&1 &
        until [ -S /run/vmm-dedup-agent/hints.sock ]; do sleep 0.2; done
        echo "L2 agent runs"
        ;;
    secret)
        # It ends with its standard input.
        sleep 999999 | secret >/run/secret.log 2>&1 &
        until [ -s /run/secret.log ]; do sleep 0.2; done
        echo "L2 secret: $(cat /run/secret.log)"
        ;;
    own)
        # So many MiB of memory that no other guest has the like of: each is another part of random bytes, and none begins where a page does.
        python3.13 -S -c 'import os, sys, time
random = os.urandom(8 << 20)
own = [random[n * 4099 : n * 4099 + (1 << 20)] for n in range(int(sys.argv[1]))]
print("L2 own", len(own), flush=True)
time.sleep(1e6)' "$argument" &
        ;;
    open)
        # Memory that nobody marks.
        python3.13 -S -c 'import time
open = b"u" * 1048576
print("L2 open", flush=True)
time.sleep(1e6)' &
        ;;
    build)
        # Tables are built and sorted, and so are lines of text; nothing of it stays.
        n=0
        while [ $n -lt "$argument" ]; do
            n=$((n + 1))
            python "$n" && [ "$(seq 20000 | sort -r | sort -n | tail -n 1)" = 20000 ] || echo "L2 build $n FAILED"
        done
        echo "L2 built $n"
        ;;
    reboot) reboot -f ;;
    poweroff) poweroff -f ;;
    esac
done
