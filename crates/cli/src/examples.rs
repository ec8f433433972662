//! Examples at the end of each verb's help. They are pasted: images are named as in the README.

pub(crate) const INFO: &str = "\
EXAMPLES:
  mica info disk.qcow2
  mica info --backing-chain --output json top.qcow2";

pub(crate) const MAP: &str = "\
EXAMPLES:
  mica map top.qcow2                        # which file of the chain has what
  mica map --output json top.qcow2          # also zeros and holes, as qemu-img";

pub(crate) const CHECK: &str = "\
EXAMPLES:
  mica check disk.qcow2
  mica check -r leaks disk.qcow2            # frees clusters that nothing uses
  mica check -r all disk.qcow2              # repairs what can be repaired";

pub(crate) const COMPARE: &str = "\
EXAMPLES:
  mica compare disk.qcow2 copy.qcow2
  mica compare -F raw disk.qcow2 copy.raw";

pub(crate) const CREATE: &str = "\
EXAMPLES:
  mica create disk.qcow2 20G
  mica create -b base.qcow2 -F qcow2 overlay.qcow2
  mica create -f raw -o preallocation=falloc disk.raw 20G
  mica create -o help                       # lists the options of qcow2 images";

pub(crate) const CONVERT: &str = "\
EXAMPLES:
  mica convert -p top.qcow2 copy.qcow2      # a chain as one image
  mica convert -c -o compression_type=zstd disk.qcow2 small.qcow2
  mica convert -p -O raw disk.qcow2 /dev/vg/disk
  mica convert -O raw disk.qcow2 - | gzip > disk.raw.gz
  mica convert -B base.qcow2 -F qcow2 top.qcow2 difference.qcow2";

pub(crate) const RESIZE: &str = "\
EXAMPLES:
  mica resize disk.qcow2 +10G
  mica resize --shrink disk.qcow2 5G        # what lies beyond is lost";

pub(crate) const MEASURE: &str = "\
EXAMPLES:
  mica measure top.qcow2                    # the space for `mica convert` of it
  mica measure -o cluster_size=2M --size 1T";

pub(crate) const READ: &str = "\
EXAMPLES:
  mica read disk.qcow2 0 512 | xxd          # the first sector
  mica read disk.qcow2 1M > rest.bin";

pub(crate) const WRITE: &str = "\
EXAMPLES:
  mica write disk.qcow2 1M < boot.bin";

pub(crate) const INDEX_BUILD: &str = "\
EXAMPLES:
  mica index build top.qcow2
  mica index build --index-dir /var/cache/mica top.qcow2";

pub(crate) const INDEX_STATUS: &str = "\
EXAMPLES:
  mica index status top.qcow2 | tail -1     # the totals";

pub(crate) const INDEX_DROP: &str = "\
EXAMPLES:
  mica index drop top.qcow2";

pub(crate) const GEN_CHAIN: &str = "\
EXAMPLES:
  mica gen chain --layers 100 --size 1G chain
  mica gen chain --features all --seed 7 --size 64M strange";
