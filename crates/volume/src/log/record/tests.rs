use super::*;
use mica_units::Rng;

const BYTES: [u8; BLOCK_BYTES] = [5; BLOCK_BYTES];
const LAST_BLOCK: u64 = State::LEN_MAX / BLOCK_BYTES as u64 - 1;

fn records(label: &str) -> [Record<'_>; 9] {
    [
        Record::Data { block: LAST_BLOCK, bytes: &BYTES },
        Record::Nothing { first: 3, count: LAST_BLOCK - 2 },
        Record::Length { bytes: State::LEN_MAX },
        Record::Length { bytes: 0 },
        Record::Take { number: u64::MAX, time_ns: 7, label },
        Record::Take { number: 0, time_ns: u64::MAX, label: "" },
        Record::Drop { number: 9 },
        Record::Label { number: 2, label },
        Record::Encrypted { block: LAST_BLOCK, bytes: &BYTES },
    ]
}

#[test]
fn records_are_read_as_they_were_written_one_after_the_other() {
    let label = "é".repeat(127);
    let mut bytes = Vec::new();
    for record in records(&label) {
        assert!(record.encoded_len() <= RECORD_BYTES_MAX);
        let start = bytes.len();
        bytes.resize(start + record.encoded_len(), 0xff);
        record.encode(&mut bytes[start..]);
    }
    let mut rest = &bytes[..];
    for record in records(&label) {
        let (decoded, after) = Record::decode(rest).expect("a record");
        assert_eq!(decoded, record);
        rest = after;
    }
    assert_eq!(Record::decode(rest), None);
}

#[test]
fn only_blocks_are_encrypted_each_with_its_number() {
    let label = "a label";
    let mut bytes = Vec::new();
    for record in records(label).into_iter().chain(records(label)) {
        let start = bytes.len();
        bytes.resize(start + record.encoded_len(), 0);
        record.encode(&mut bytes[start..]);
    }
    let seen = std::cell::RefCell::new(Vec::new());
    encrypt_blocks(&mut bytes, 40, |number, block| {
        seen.borrow_mut().push(number);
        block.fill(9);
    });
    assert_eq!(*seen.borrow(), [40, 49]);
    let mut rest = &bytes[..];
    for record in records(label).into_iter().chain(records(label)) {
        let wanted = match record {
            Record::Data { block, .. } => Record::Encrypted { block, bytes: &[9; BLOCK_BYTES] },
            record => record,
        };
        let (decoded, after) = Record::decode(rest).expect("a record");
        assert_eq!(decoded, wanted);
        rest = after;
    }
}

#[test]
fn what_no_disk_can_have_is_not_a_record() {
    for record in [
        Record::Data { block: LAST_BLOCK + 1, bytes: &BYTES },
        Record::Nothing { first: LAST_BLOCK, count: 2 },
        Record::Nothing { first: 1, count: u64::MAX },
        Record::Nothing { first: 1, count: 0 },
        Record::Length { bytes: 513 },
        Record::Length { bytes: State::LEN_MAX + 512 },
        Record::Label { number: 1, label: &"a".repeat(256) },
    ] {
        assert!(!record.is_valid(), "{record:?}");
        let mut bytes = vec![0; record.encoded_len()];
        record.encode(&mut bytes);
        assert_eq!(Record::decode(&bytes), None);
    }
}

#[test]
fn random_bytes_are_a_record_or_not_and_never_a_panic() {
    for seed in 0..5000 {
        let mut rng = Rng::new(seed);
        let which = usize::try_from(rng.below(9)).unwrap();
        let record = records("a label")[which];
        let mut bytes = vec![0; record.encoded_len()];
        record.encode(&mut bytes);
        for _ in 0..1 + rng.below(4) {
            let within = rng.below(bytes.len().min(40) as u64);
            bytes[usize::try_from(within).unwrap()] ^= 1 << rng.below(8);
        }
        if rng.percent(20) {
            bytes.truncate(usize::try_from(rng.below(bytes.len() as u64)).unwrap());
        }
        if let Some((decoded, rest)) = Record::decode(&bytes) {
            let len = bytes.len() - rest.len();
            assert_eq!(len, decoded.encoded_len(), "seed {seed}");
            let mut again = vec![0; len];
            decoded.encode(&mut again);
            assert_eq!(again, bytes[..len], "seed {seed}");
        }
    }
}
