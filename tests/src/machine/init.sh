#!/bin/busybox sh
# The first process of a test machine: it readies the machine, runs the test's script, and tells the
# console how that ended. What the host looks for begins with MACHINE.
/bin/busybox mkdir -p /proc /sys /dev /tmp /mnt
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do
    insmod "/modules/$module.ko" || echo "MACHINE-FAILED insmod $module"
done
if [ -f /wants-disk ]; then
    tries=0
    while [ ! -b /dev/vda ] && [ $tries -lt 200 ]; do
        sleep 0.05
        tries=$((tries + 1))
    done
fi
echo "MACHINE-UP $(cut -d' ' -f1 /proc/uptime)"
if sh -e /script; then
    echo "MACHINE-PASSED $(cut -d' ' -f1 /proc/uptime)"
else
    echo "MACHINE-FAILED"
fi
sync
reboot -f
