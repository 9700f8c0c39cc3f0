#!/busybox sh
# Init of L1: makes KVM available, plays a scenario, powers off.
/busybox mkdir -p /proc /sys /dev /tmp /run /usr/local/bin
/busybox --install -s /usr/local/bin
export PATH=/usr/local/bin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
# Guests run no guests: before Linux 6.13 a VM that may is refused.
for module in @modules@; do
    case $module in
    kvm-*) parameters=nested=0 ;;
    *) parameters= ;;
    esac
    [ ! -e /modules/$module.ko ] || insmod /modules/$module.ko $parameters 2>/dev/null
done
ip link set lo up
# A guest's shared pages are scattered.
echo 1048576 >/proc/sys/vm/max_map_count
export GUEST_ARGUMENTS='@guest_arguments@'
vmm-dedup-nested inside @scenario@
poweroff -f
