//! What stands at the end of the `--help` of each verb.

pub(super) const VOLUME: &str = "\
EXAMPLES:
  mica volume create file:///srv/volumes/web 10G
  mica serve --nbd unix:web.sock --volume file:///srv/volumes/web
  mica volume list file:///srv/volumes

STORES:
  file:///DIR            a directory: no server is needed
  s3://BUCKET/PREFIX     a bucket, configured as for AWS's own tools: AWS_ACCESS_KEY_ID,
                         AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL for others
  rados://POOL/PREFIX    a pool of Ceph
  Append /NAME for a volume, and @LABEL for one of its snapshots.";

pub(super) const CREATE: &str = "\
EXAMPLES:
  mica volume create file:///srv/volumes/web 10G
  mica volume create s3://bucket/volumes/web 1T
  (umask 077; openssl rand -hex 32 > web.key)
  mica volume create --compress zstd --encrypt --volume-key web.key file:///srv/volumes/db 10G";

pub(super) const LIST: &str = "\
EXAMPLES:
  mica volume list file:///srv/volumes
  mica volume list --output json s3://bucket/volumes | jq -r '.[].name'";

pub(super) const INFO: &str = "\
EXAMPLES:
  mica volume info file:///srv/volumes/web";

pub(super) const DELETE: &str = "\
EXAMPLES:
  mica volume delete file:///srv/volumes/web";

pub(super) const CHECK: &str = "\
EXAMPLES:
  mica volume check file:///srv/volumes/web
  mica volume check file:///srv/volumes     # all of them

EXIT STATUS:
  0  nothing is damaged
  1  something could not be checked
  2  something is damaged; each line on standard error names a part";

pub(super) const SCRUB: &str = "\
EXAMPLES:
  mica volume scrub file:///srv/volumes

EXIT STATUS:
  0  nothing is damaged
  1  something could not be read
  2  something is damaged; each line on standard error names a part";

pub(super) const GC: &str = "\
EXAMPLES:
  mica volume gc file:///srv/volumes
  mica volume gc --dry-run s3://bucket/volumes   # what would be freed";

pub(super) const STATS: &str = "\
EXAMPLES:
  mica volume stats file:///srv/volumes          # a line for each volume
  mica volume stats file:///srv/volumes/web      # and what each snapshot owns alone
  mica volume stats --output json s3://bucket/volumes | jq '.\"garbage-bytes\"'";

pub(super) const IMPORT: &str = "\
EXAMPLES:
  mica volume import top.qcow2 file:///srv/volumes/web
  mica volume import -f raw -p disk.raw file:///srv/volumes/db
  mica volume import nbd://storage:10809/web file:///srv/volumes/web";

pub(super) const EXPORT: &str = "\
EXAMPLES:
  mica volume export file:///srv/volumes/web copy.qcow2
  mica volume export -p -O raw file:///srv/volumes/web@monday copy.raw";

pub(super) const SNAPSHOT: &str = "\
EXAMPLES:
  mica volume snapshot file:///srv/volumes/web monday";

pub(super) const SNAPSHOTS: &str = "\
EXAMPLES:
  mica volume snapshots file:///srv/volumes/web
  mica volume snapshots --output json file:///srv/volumes/web | jq -r '.[].label'";

pub(super) const LABEL: &str = "\
EXAMPLES:
  mica volume label file:///srv/volumes/web@monday before-the-update";

pub(super) const SEND: &str = "\
EXAMPLES:
  mica volume send file:///srv/volumes/web@monday web-monday.stream
  mica volume send file:///srv/volumes/web@tuesday --since monday |
      ssh host-2 mica volume receive s3://bucket/volumes/web";

pub(super) const RECEIVE: &str = "\
EXAMPLES:
  mica volume receive file:///srv/copies/web web-monday.stream";

pub(super) const DROP: &str = "\
EXAMPLES:
  mica volume drop file:///srv/volumes/web@monday";

pub(super) const ROLLBACK: &str = "\
EXAMPLES:
  mica volume rollback file:///srv/volumes/web@monday";

pub(super) const CLONE: &str = "\
EXAMPLES:
  mica volume clone file:///srv/volumes/gold@v1 file:///srv/volumes/web2";

pub(super) const DIFF: &str = "\
EXAMPLES:
  mica volume diff file:///srv/volumes/web@monday file:///srv/volumes/web@tuesday";

pub(super) const TREE: &str = "\
EXAMPLES:
  mica volume tree file:///srv/volumes
  mica volume tree --output svg file:///srv/volumes > volumes.svg";

pub(super) const HANDOVER: &str = "\
EXAMPLES:
  mica volume handover s3://bucket/volumes/web host-2
  mica volume handover --cancel s3://bucket/volumes/web";

pub(super) const REKEY: &str = "\
EXAMPLES:
  (umask 077; openssl rand -hex 32 > new.key)
  mica volume rekey --volume-key web.key --new-volume-key new.key file:///srv/volumes/web";

pub(super) const KEEP: &str = "\
EXAMPLES:
  mica volume keep file:///srv/volumes/web 1h/1m,1d/1h,4w/1d
  mica volume keep --dry-run file:///srv/volumes/web 1w/1d";

pub(super) const LOG: &str = "\
EXAMPLES:
  mica volume log list /var/lib/mica/log
  mica volume log drop /var/lib/mica/log 5f0c";

pub(super) const LOG_LIST: &str = "\
EXAMPLES:
  mica volume log list /var/lib/mica/log
  mica volume log list /var/lib/mica/log file:///srv/volumes   # with names";

pub(super) const LOG_DROP: &str = "\
EXAMPLES:
  mica volume log drop /var/lib/mica/log 5f0c
  mica volume log drop --force /var/lib/mica/log damaged";
