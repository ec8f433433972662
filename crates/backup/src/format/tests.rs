use super::*;
use mica_units::Rng;

fn begin(base: Option<&str>) -> Begin {
    Begin {
        disk: "web".to_owned(),
        state: "tue".to_owned(),
        base: base.map(str::to_owned),
        len: 1 << 30,
        time_ns: 12,
    }
}

fn manifest() -> Manifest {
    let mut at = BEGIN_BYTES as u64;
    let mut entries = Vec::new();
    for (start, len, stored) in [(0, 4096, 4096), (8192, 1 << 20, 77), (2 << 20, 1 << 29, 0)] {
        let sum = if stored == 0 { 0 } else { 5 };
        entries.push(Entry { piece: Piece { start, len, stored, sum }, at });
        at += PART_BYTES as u64 + u64::from(stored);
    }
    let total = Total { data_bytes: 4096 + (1 << 20), parts: 3, sum: 9 };
    let file_bytes = at + PART_BYTES as u64;
    let begin = begin(Some("mon"));
    Manifest { begin, number: 3, key: 7, content: 11, total, file_bytes, entries }
}

#[test]
fn what_is_written_is_read() {
    for base in [None, Some("mon")] {
        assert_eq!(Begin::decode(&begin(base).encode()), Ok(begin(base)));
    }
    let manifest = manifest();
    assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
}

#[test]
fn every_changed_bit_is_noticed() {
    let (begin, manifest) = (begin(Some("mon")).encode(), manifest().encode());
    for bit in 0..begin.len() * 8 {
        let mut bytes = begin;
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Begin::decode(&bytes).is_err(), "bit {bit}");
    }
    for bit in 0..manifest.len() * 8 {
        let mut bytes = manifest.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Manifest::decode(&bytes).is_err(), "bit {bit}");
    }
    for len in 0..manifest.len() {
        assert!(Manifest::decode(&manifest[..len]).is_err(), "{len} bytes");
    }
}

/// What has right sums and wrong content.
#[test]
fn contradictions_are_refused() {
    let refused = |change: &dyn Fn(&mut Manifest)| {
        let mut manifest = manifest();
        change(&mut manifest);
        let decoded = Manifest::decode(&manifest.encode());
        assert!(decoded.is_err(), "{manifest:?}");
    };
    refused(&|manifest| manifest.entries[1].piece.start = 0);
    refused(&|manifest| manifest.entries[0].piece.start = 100);
    refused(&|manifest| manifest.entries[0].piece.stored = 4097);
    refused(&|manifest| manifest.entries[1].piece.len = 2 << 20);
    refused(&|manifest| manifest.entries[2].piece.len = 1 << 40);
    refused(&|manifest| manifest.entries[2].piece.sum = 1);
    refused(&|manifest| manifest.entries[1].at += 1);
    refused(&|manifest| manifest.total.data_bytes += 1);
    refused(&|manifest| manifest.file_bytes -= 1);
    refused(&|manifest| manifest.begin.base = Some("tue".to_owned()));
    refused(&|manifest| manifest.begin.state = "../tue".to_owned());
    refused(&|manifest| manifest.begin.len = 1 << 63);
    let of_another = |version: u32| {
        let mut bytes = begin(None).encode();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        let sum = crc32c(&bytes[..BEGIN_BYTES - SUM_BYTES]);
        bytes[BEGIN_BYTES - SUM_BYTES..].copy_from_slice(&sum.to_le_bytes());
        Begin::decode(&bytes)
    };
    assert_eq!(of_another(2), Err(Malformed::Version(2)));
}

/// Bytes of an enemy, some of which have right sums.
#[test]
fn anything_is_decoded_without_harm() {
    let good = manifest().encode();
    for seed in 0..3000 {
        let mut rng = Rng::new(seed);
        let mut bytes = good.clone();
        for _ in 0..=rng.below(4) {
            let at = usize::try_from(rng.below(bytes.len() as u64)).unwrap();
            bytes[at] = u8::try_from(rng.below(256)).unwrap();
        }
        if rng.percent(80) {
            let sums = [(0, HEAD_BYTES), (HEAD_BYTES, BEGIN_BYTES)];
            for (start, len) in sums {
                let end = start + len - SUM_BYTES;
                let sum = crc32c(&bytes[start..end]).to_le_bytes();
                bytes[end..end + SUM_BYTES].copy_from_slice(&sum);
            }
            let (first, end) = (HEAD_BYTES + BEGIN_BYTES, bytes.len() - SUM_BYTES);
            let sum = crc32c(&bytes[first..end]).to_le_bytes();
            bytes[end..].copy_from_slice(&sum);
        }
        crate::decode_anything(&bytes);
        crate::decode_anything(&bytes[HEAD_BYTES..]);
    }
}
