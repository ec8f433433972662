//! What stands at the end of each verb's `--help`, in sections that its man page has too: a line of
//! capitals with a colon, and lines that are indented. And what only man pages have.
//!
//! Examples are pasted: images are named as in the README.

use crate::client::CONTROL_ARG;

/// A variable or a file that counts for the verbs that have an option.
pub(crate) struct Influence {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// The option, by its id.
    option: &'static str,
}

impl Influence {
    /// Whether it counts for `verb`, or for one of the verbs below it.
    pub(crate) fn counts_for(&self, verb: &clap::Command) -> bool {
        verb.get_arguments().any(|option| option.get_id() == self.option)
            || verb.get_subcommands().any(|below| self.counts_for(below))
    }
}

pub(crate) const ENVIRONMENT: &[Influence] = &[
    Influence {
        name: "MICA_ALLOW_PATH",
        what: "Directories, separated by colons, in which images may name files, besides those of \
               --allow-path.",
        option: "allow_path",
    },
    Influence {
        name: "MICA_CONTROL",
        what: "The control socket of the server that `mica ctl` and `mica top` talk to.",
        option: CONTROL_ARG,
    },
    Influence {
        name: "TMPDIR",
        what: "Where the temporary file of a disk with --ephemeral is; /tmp by default.",
        option: "ephemeral",
    },
    Influence {
        name: "LISTEN_FDS, LISTEN_FDNAMES, LISTEN_PID, NOTIFY_SOCKET, WATCHDOG_USEC",
        what: "Set by systemd for a server: sockets that it passes, and where to notify it.",
        option: "takeover",
    },
];

pub(crate) const FILES: &[Influence] = &[
    Influence {
        name: "/etc/mica/config.toml, ~/.config/mica/config.toml",
        what: "The key allow-path lists directories in which images may name files, besides those \
               of --allow-path. The second is in $XDG_CONFIG_HOME if that is set.",
        option: "allow_path",
    },
    Influence {
        name: "LAYER.mica-index",
        what: "The sidecar of a layer, beside it or in --index-dir: what the layer changed in the \
               index of its chain. It can be deleted at any time, and is rebuilt.",
        option: "index_dir",
    },
    Influence {
        name: "/dev/shm/mica-UID",
        what: "Writes that servers of this user acknowledged and did not flush: if one is killed, \
               the next process to open the image needs them. Their owner removes them.",
        option: "redo_dir",
    },
    Influence {
        name: "/run/mica/control.sock",
        what: "The control socket, unless --control or MICA_CONTROL names another.",
        option: CONTROL_ARG,
    },
    Influence {
        name: "/etc/mica.toml",
        what: "The disks that the unit mica.service serves.",
        option: "takeover",
    },
];

/// The exit status of verbs that have none of their own.
pub(crate) const EXIT_STATUS: &str = "\
EXIT STATUS:
  0  success
  1  failure; a line on standard error says what, where and what to do";

/// Programs whose pages a user of `verb` may look for.
pub(crate) fn peers(verb: &str) -> &'static [&'static str] {
    match verb {
        "mica" => &["qemu-img(1)", "qemu-nbd(8)", "nbdkit(1)"],
        "mica-serve" => &["qemu-nbd(8)", "nbdinfo(1)", "nbdcopy(1)", "systemd.socket(5)"],
        "mica-amend" | "mica-bench" | "mica-bitmap" | "mica-info" | "mica-map" | "mica-check"
        | "mica-compare" | "mica-create" | "mica-convert" | "mica-dd" | "mica-resize"
        | "mica-commit" | "mica-rebase" | "mica-measure" | "mica-read" | "mica-write" => {
            &["qemu-img(1)"]
        }
        _ => &[],
    }
}

pub(crate) const MICA: &str = "\
EXAMPLES:
  mica info --backing-chain top.qcow2
  mica serve --nbd unix:disk.sock disk.qcow2
  mica help serve                           # options, files and exit codes of a verb";

pub(crate) const SERVE: &str = "\
EXAMPLES:
  mica serve --nbd unix:disk.sock disk.qcow2
  mica serve -r --nbd tcp:127.0.0.1:10809 top.qcow2
  mica serve --ephemeral --vhost-user vm.sock base.qcow2
  mica serve --nbd unix:web.sock --volume file:///srv/volumes/web --log-device /var/lib/mica/log
  mica serve -r --run 'nbdcopy \"$uri\" copy.raw' top.qcow2
  mica serve --config /etc/mica.toml --fork
  mica serve --config /etc/mica.toml --takeover --fork    # upgrades that server

CONFIGURATION:
  control = \"/run/mica/control.sock\"       # keys are options of this verb
  [[disk]]
  name = \"web\"
  image = \"/var/lib/vm/web.qcow2\"
  vhost-user = \"/run/mica/web.sock\"
  nbd = [\"/run/mica/all.nbd\"]            # others may be at the same socket

EXIT STATUS:
  0  stopped on request, and all acknowledged writes are in the images
  1  wrong usage, or could not serve, or could not write everything that was acknowledged
  Otherwise, with --run, the exit status of the command.";

pub(crate) const CTL: &str = "\
EXAMPLES:
  mica ctl status
  mica ctl --control demo/control.sock stats web";

pub(crate) const CTL_STATUS: &str = "\
EXAMPLES:
  mica ctl status
  mica ctl status web
  mica ctl status --output json | jq -r '.disks[].state'";

pub(crate) const CTL_SNAPSHOT: &str = "\
EXAMPLES:
  mica ctl snapshot web before-the-update        # a volume
  mica ctl snapshot web /vm/web-2.qcow2          # a chain gets a layer
  mica ctl snapshot --group web=web-2.qcow2 db=db-2.qcow2
  mica ctl snapshot --quiesce /run/qga.sock web /vm/web-2.qcow2";

pub(crate) const CTL_SNAPSHOTS: &str = "\
EXAMPLES:
  mica ctl snapshots web
  mica ctl snapshots --output json web | jq -r '.[].label'";

pub(crate) const CTL_DROP: &str = "\
EXAMPLES:
  mica ctl drop web before-the-update";

pub(crate) const CTL_LABEL: &str = "\
EXAMPLES:
  mica ctl label web 17 keep-this           # by its number";

pub(crate) const CTL_CLONE: &str = "\
EXAMPLES:
  mica ctl clone web@monday web2            # a volume beside it, in the same store
  mica ctl clone web web3                   # what it has now";

pub(crate) const CTL_DIFF: &str = "\
EXAMPLES:
  mica ctl diff web@monday                  # until now
  mica ctl diff web@monday tuesday";

pub(crate) const CTL_ROLLBACK: &str = "\
EXAMPLES:
  mica ctl drain web                        # once its guest has stopped
  mica ctl rollback web@monday
  mica ctl undrain web";

pub(crate) const CTL_INFO: &str = "\
EXAMPLES:
  mica ctl info web";

pub(crate) const CTL_TREE: &str = "\
EXAMPLES:
  mica ctl tree web
  mica ctl tree --store web                 # with all others of its store
  mica ctl tree --svg web > web.svg";

pub(crate) const CTL_CHECK: &str = "\
EXAMPLES:
  mica ctl check web
  mica ctl check --store web                # and all others of its store

EXIT STATUS:
  0  nothing is damaged
  1  something could not be checked
  2  something is damaged; each line on standard error names a part";

pub(crate) const CTL_SCRUB: &str = "\
EXAMPLES:
  mica ctl scrub --store web                # everything in its store

EXIT STATUS:
  0  nothing is damaged
  1  something could not be read
  2  something is damaged; each line on standard error names a part";

pub(crate) const CTL_GC: &str = "\
EXAMPLES:
  mica ctl gc web
  mica ctl gc --dry-run web                 # what would be freed";

pub(crate) const CTL_BACKUP: &str = "\
EXAMPLES:
  mica ctl backup begin web --as monday --nbd unix:/run/mica/backup.sock
  nbdcopy 'nbd+unix:///web?socket=/run/mica/backup.sock' web-monday.raw
  mica ctl backup end web";

pub(crate) const CTL_BACKUP_BEGIN: &str = "\
EXAMPLES:
  mica ctl backup begin web --as monday --nbd unix:backup.sock
  mica ctl backup end web
  mica ctl backup begin web --since monday --as tuesday --nbd unix:backup.sock
  nbdinfo --map=qemu:dirty-bitmap:monday 'nbd+unix:///web?socket=backup.sock'";

pub(crate) const CTL_BACKUP_END: &str = "\
EXAMPLES:
  mica ctl backup end web";

pub(crate) const CTL_BACKUP_DROP: &str = "\
EXAMPLES:
  mica ctl backup drop web monday
  mica ctl backup drop --rate 100M --background web tuesday";

pub(crate) const CTL_BACKUP_PRUNE: &str = "\
EXAMPLES:
  mica ctl backup prune --keep 7 web
  mica ctl backup prune --keep 1 --rate 100M web";

pub(crate) const CTL_BACKUP_LIST: &str = "\
EXAMPLES:
  mica ctl backup list web
  mica ctl backup list --output json web | jq -r '.states[-1].state'";

pub(crate) const CTL_STREAM: &str = "\
EXAMPLES:
  mica ctl stream web --base base.qcow2 --rate 100M
  mica ctl stream web                       # it needs no other file then";

pub(crate) const CTL_COMMIT: &str = "\
EXAMPLES:
  mica ctl commit web
  mica ctl commit web --top monday.qcow2
  mica ctl commit web --top friday.qcow2 --base sunday.qcow2 --background";

pub(crate) const CTL_JOBS: &str = "\
EXAMPLES:
  mica ctl jobs
  mica ctl jobs --all
  mica ctl jobs --output json | jq -r '.[] | select(.state == \"running\").disk'";

pub(crate) const CTL_CANCEL: &str = "\
EXAMPLES:
  mica ctl cancel web";

pub(crate) const CTL_PAUSE: &str = "\
EXAMPLES:
  mica ctl pause web";

pub(crate) const CTL_RESUME: &str = "\
EXAMPLES:
  mica ctl resume web";

pub(crate) const CTL_STATS: &str = "\
EXAMPLES:
  mica ctl stats web
  mica ctl stats --space web                # what a volume holds in its store";

pub(crate) const CTL_RESIZE: &str = "\
EXAMPLES:
  mica ctl resize web +10G
  mica ctl resize web 40G";

pub(crate) const CTL_ADD: &str = "\
EXAMPLES:
  mica ctl add --nbd unix:/run/mica/then.nbd -r /var/lib/vm/then.qcow2
  mica ctl add --save --config one-more.toml";

pub(crate) const CTL_REMOVE: &str = "\
EXAMPLES:
  mica ctl remove then
  mica ctl remove --save db web             # nor after a restart";

pub(crate) const CTL_DRAIN: &str = "\
EXAMPLES:
  mica ctl drain web
  mica ctl drain                            # all, and the server ends";

pub(crate) const CTL_HANDOVER: &str = "\
EXAMPLES:
  mica ctl handover web --to host-2
  ssh host-2 mica serve --nbd unix:web.sock --volume s3://bucket/volumes/web";

pub(crate) const CTL_UNDRAIN: &str = "\
EXAMPLES:
  mica ctl undrain web";

pub(crate) const CTL_RELOAD: &str = "\
EXAMPLES:
  mica ctl reload

EXIT STATUS:
  0  success
  1  failure, or a disk or certificates were left as they are; a line says which and why";

pub(crate) const CTL_LOG_LEVEL: &str = "\
EXAMPLES:
  mica ctl log-level debug
  mica ctl log-level                        # what it is now";

pub(crate) const TOP: &str = "\
EXAMPLES:
  mica top
  mica top --interval 5 --count 12          # a minute of lines in a script
  mica top --output json --count 1";

pub(crate) const INFO: &str = "\
EXAMPLES:
  mica info disk.qcow2
  mica info --backing-chain --output json top.qcow2";

pub(crate) const MAP: &str = "\
EXAMPLES:
  mica map top.qcow2                        # which file of the chain has what
  mica map --output json top.qcow2          # also zeros and holes, as qemu-img";

pub(crate) const TREE: &str = "\
EXAMPLES:
  mica tree chain
  mica tree --all --allow-path /srv/gold /srv/vm
  mica tree --svg /srv/vm > vm.svg
  mica tree --output json /srv/vm | jq -r '.images[] | select(.overlays == 0) | .filename'";

pub(crate) const SURVEY: &str = "\
EXAMPLES:
  mica survey /srv/vm
  mica survey --html survey.html /srv/vm
  mica survey --output json /srv/vm | jq '.suffering[] | select(.indexed | not) | .filename'";

pub(crate) const CHECK: &str = "\
EXAMPLES:
  mica check disk.qcow2
  mica check -r leaks disk.qcow2            # frees clusters that nothing uses
  mica check -r all disk.qcow2              # repairs what can be repaired

EXIT STATUS:
  0   nothing was found, or everything was repaired
  1   the check failed
  2   corruption
  3   leaks only
  63  the format has no check
  After repairs, only what is left counts.";

pub(crate) const COMPARE: &str = "\
EXAMPLES:
  mica compare disk.qcow2 copy.qcow2
  mica compare -F raw disk.qcow2 copy.raw

EXIT STATUS:
  0  identical
  1  different
  2  an image could not be opened
  3  other errors";

pub(crate) const DIFF: &str = "\
EXAMPLES:
  mica diff --summary monday.qcow2 top.qcow2
  mica diff --output json monday.qcow2 top.qcow2
  mica diff --content one-clone.qcow2 another.qcow2
  mica diff disk.qcow2@before disk.qcow2     # an internal snapshot, and now";

pub(crate) const CREATE: &str = "\
EXAMPLES:
  mica create disk.qcow2 20G
  mica create -b disk.qcow2 -F qcow2 overlay.qcow2
  mica create -f raw -o preallocation=falloc disk.raw 20G
  mica create -o help                       # lists the options of qcow2 images";

pub(crate) const CONVERT: &str = "\
EXAMPLES:
  mica convert -p top.qcow2 copy.qcow2      # a chain as one image
  mica convert -c -o compression_type=zstd disk.qcow2 small.qcow2
  mica convert -p -O raw disk.qcow2 /dev/vg/disk
  mica convert -O raw disk.qcow2 - | gzip > disk.raw.gz
  mica convert -B base.qcow2 -F qcow2 top.qcow2 difference.qcow2
  mica convert --bitmaps disk.qcow2 moved.qcow2
  mica convert -p 'nbd+unix:///web?socket=web.sock' web.qcow2   # what a server exports
  zcat disk.raw.gz | mica convert --format raw - again.qcow2";

pub(crate) const DD: &str = "\
EXAMPLES:
  mica dd if=disk.qcow2 of=start.raw bs=1M count=4
  mica dd -O qcow2 if=disk.qcow2 of=rest.qcow2 bs=1M skip=4";

pub(crate) const CLONE: &str = "\
EXAMPLES:
  mica clone gold.qcow2 web.qcow2
  mica clone --count 100 gold.qcow2 desk.qcow2   # desk-1.qcow2 to desk-100.qcow2";

pub(crate) const SNAPSHOT: &str = "\
EXAMPLES:
  mica snapshot -c before-the-update disk.qcow2
  mica snapshot -l disk.qcow2
  mica snapshot -a before-the-update disk.qcow2
  mica snapshot -d before-the-update disk.qcow2";

pub(crate) const RESIZE: &str = "\
EXAMPLES:
  mica resize disk.qcow2 +10G
  mica resize --shrink disk.qcow2 5G        # what lies beyond is lost";

pub(crate) const AMEND: &str = "\
EXAMPLES:
  mica amend -o compat=1.1,lazy_refcounts=on disk.qcow2
  mica amend -o refcount_bits=64 disk.qcow2
  mica amend -o help                        # what can be changed";

pub(crate) const BITMAP: &str = "\
EXAMPLES:
  mica bitmap --add -g 64k disk.qcow2 monday
  mica bitmap --disable disk.qcow2 monday
  mica bitmap --add --disable --merge monday --merge tuesday disk.qcow2 both
  mica bitmap --merge monday -b copy.qcow2 disk.qcow2 monday";

pub(crate) const BACKUP: &str = "\
EXAMPLES:
  mica ctl backup begin web --as monday --nbd unix:backup.sock
  mica backup --since-last 'nbd+unix:///web?socket=backup.sock' /backup/web
  mica ctl backup end web
  mica backup -p web.qcow2@monday monday    # the same, without the server
  mica backup --since monday web.qcow2@tuesday - | ssh host 'cat > tuesday'";

pub(crate) const BACKUP_LIST: &str = "\
EXAMPLES:
  mica backup list /backup/web
  mica backup list --output json /backup/web | jq -r '.[-1].state'";

pub(crate) const BACKUP_PRUNE: &str = "\
EXAMPLES:
  mica backup prune --keep 7 /backup/web
  mica backup prune --keep 2d/1h,30d/1d,52w/1w /backup/web   # one of each hour for two days, …
  mica backup prune -n --keep 1 /backup/web                  # what would be removed

All other states of these times are removed. A restore or verify that runs meanwhile may miss
files.";

pub(crate) const BACKUP_VERIFY: &str = "\
EXAMPLES:
  mica backup verify -p /backup/web
  mica backup verify /backup/web@monday

EXIT STATUS:
  0  everything is whole
  1  something is damaged or missing, or could not be read";

pub(crate) const RESTORE: &str = "\
EXAMPLES:
  mica restore -p /backup/web@tuesday web.qcow2
  mica restore -O raw /backup/web web.raw   # the newest state
  cat monday tuesday | mica restore - both.qcow2   # streams of `mica backup … -`";

pub(crate) const COMMIT: &str = "\
EXAMPLES:
  mica commit top.qcow2
  mica commit -p -b base.qcow2 top.qcow2    # with all layers in between";

pub(crate) const REBASE: &str = "\
EXAMPLES:
  mica rebase -b other.qcow2 -F qcow2 top.qcow2
  mica rebase -p -b '' top.qcow2            # it then needs no other file
  mica rebase -u -b moved/base.qcow2 -F qcow2 top.qcow2";

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

pub(crate) const BENCH: &str = "\
EXAMPLES:
  mica bench top.qcow2
  mica bench -c 10000 -d 1 -S 1M top.qcow2  # one at a time, far apart
  mica bench -w --flush-interval 64 scratch.qcow2   # overwrites what is there";

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

pub(crate) const GEN_FLEET: &str = "\
EXAMPLES:
  mica gen fleet --chains 2000 fleet
  mica survey --html fleet.html fleet";

pub(crate) const INDEX: &str = "\
EXAMPLES:
  mica index build top.qcow2
  mica index status top.qcow2 | tail -1     # the totals";

pub(crate) const GEN: &str = "\
EXAMPLES:
  mica gen chain --layers 100 --size 1G chain";
