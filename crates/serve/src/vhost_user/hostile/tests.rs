use super::*;
use crate::testing::random::Random;

/// Sessions per run; `MICA_HOSTILE_INPUTS` sets another number.
const INPUTS: u64 = 1500;

const USER: u64 = 0x7f00_0000_0000;
const DESC: u64 = 0;
const AVAIL: u64 = 0x400;
const USED: u64 = 0x600;
const META: u64 = 0x800;

fn byte(number: u64) -> u8 {
    number.to_le_bytes()[0]
}

/// A descriptor that is nearly right.
fn descriptor(random: &mut Random) -> Vec<u8> {
    let at = match random.below(8) {
        0 => random.next(),
        1 => u64::from(random.number()),
        2 => DESC,
        _ => META + random.below(0x1000),
    };
    let len = match random.below(4) {
        0 => random.number(),
        1 => 16,
        2 => 1,
        _ => 512,
    };
    let flags = [0, 1, 1, 1, 2, 3, 3, 4, random.byte()][random.index(9)];
    let next = [byte(random.below(17)), byte(random.below(260)).saturating_sub(254)];
    [&at.to_le_bytes()[..], &len.to_le_bytes(), &[flags, 0], &next].concat()
}

/// Memory with a ring of 16 that is nearly right.
fn image(random: &mut Random) -> Vec<u8> {
    let mut image = vec![0; 0x1000];
    let mut put = |at: u64, bytes: &[u8]| {
        let at = usize::try_from(at).expect("small");
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    for number in 0..48 {
        put(DESC + number * 16, &descriptor(random));
    }
    // Some that are right: a header, a sector, a status.
    for head in 0..random.below(6) {
        let kind = [0, 1, 4, 8, 11, 13, byte(random.below(20))][random.index(7)];
        put(META + head * 16, &[kind, 0, 0, 0, 0, 0, 0, 0, random.byte(), 0, 0, 0, 0, 0, 0, 0]);
        let is_written = u8::from(random.below(2) == 0) * 2;
        let segs = [(META + head * 16, 16, 1), (0x1000, 512, 1 | is_written), (0xf00, 1, 2)];
        for (place, (at, len, flags)) in (0..).zip(segs) {
            let next = byte(head * 3 + place + 1);
            let bytes = [&u64::to_le_bytes(at)[..], &u32::to_le_bytes(len), &[flags, 0, next, 0]];
            put(DESC + (head * 3 + place) * 16, &bytes.concat());
        }
    }
    let count = random.below(18);
    put(AVAIL, &[0, 0, byte(count), byte(random.below(30)).saturating_sub(28)]);
    for slot in 0..16 {
        let head = if random.below(4) == 0 { random.below(18) } else { random.below(6) * 3 };
        put(AVAIL + 4 + slot * 2, &[byte(head), 0]);
    }
    image
}

fn message(out: &mut Vec<u8>, code: u8, files: (u8, u8), payload: &[u8]) {
    out.extend([code, 0, files.0 * 4 + files.1, byte(payload.len() as u64)]);
    out.extend(payload);
}

fn words(all: &[u64]) -> Vec<u8> {
    all.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn pair(index: u64, number: u64) -> Vec<u8> {
    words(&[index | number << 32])
}

/// The messages that set a queue up, each now and then left out, twice or damaged.
fn setup(random: &mut Random) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let mut add = |code, files, payload: &[u8]| {
        let mut one = Vec::new();
        message(&mut one, code, files, payload);
        all.push(one);
    };
    let optional = random.next() & (1 << 28 | 1 << 29 | 1 << 26);
    add(1, (0, 0), &[]);
    add(2, (0, 0), &words(&[1 << 32 | 1 << 30 | optional]));
    add(16, (0, 0), &words(&[0xb20b]));
    add(5, (0, 1), &[words(&[1]), words(&[0, MEMORY_BYTES, USER, 0])].concat());
    if random.below(2) == 0 {
        add(6, (0, 1), &words(&[4096, 0]));
    }
    if random.below(3) == 0 {
        add(32, (0, 1), &words(&[1024, 8192, 2 | 16 << 16]));
    }
    for index in 0..1 + random.below(2) {
        add(8, (0, 0), &pair(index, 16));
        add(10, (0, 0), &pair(index, 0));
        let places = [index, USER + DESC, USER + USED, USER + AVAIL, USED];
        add(9, (0, 0), &words(&places));
        add(13, (3, 1), &words(&[index]));
        add(14, (3, 1), &words(&[index]));
        add(12, (3, 1), &words(&[index]));
        add(18, (0, 0), &pair(index, 1));
    }
    for _ in 0..random.below(6) {
        let index = random.below(2);
        match random.below(6) {
            0 => add(11, (0, 0), &pair(index, 0)),
            1 => add(12, (3, 1), &words(&[index])),
            2 => add(5, (0, 1), &[words(&[1]), words(&[0, MEMORY_BYTES, USER, 0])].concat()),
            3 => add(24, (0, 0), &[vec![0; 4], vec![60, 0, 0, 0], vec![0; 64]].concat()),
            4 => add(18, (0, 0), &pair(index, random.below(3))),
            _ => add(byte(random.below(45)), (random.byte() % 8, random.byte() % 3), &[0; 8]),
        }
    }
    all
}

fn input(seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let image = image(&mut random);
    let mut messages = setup(&mut random);
    for _ in 0..random.below(4).saturating_sub(1) {
        let (one, other) = (random.index(messages.len()), random.index(messages.len()));
        match random.below(3) {
            0 => drop(messages.remove(one)),
            1 => messages.swap(one, other),
            _ => {
                let message = &mut messages[one];
                let at = random.index(message.len());
                message[at] = random.byte();
            }
        }
    }
    let len = u16::try_from(image.len()).expect("short").to_le_bytes();
    [&len[..], &image, &messages.concat()].concat()
}

#[test]
fn server_survives_sessions_that_are_nearly_right() {
    let count = std::env::var("MICA_HOSTILE_INPUTS");
    let count = count.map_or(INPUTS, |count| count.parse().expect("a number"));
    let (mut done, mut malformed) = (0, 0);
    for seed in 0..count {
        let input = input(seed);
        match std::panic::catch_unwind(|| survive(&input)) {
            Ok(counters) => {
                done += counters.reads + counters.writes + counters.flushes;
                malformed += counters.malformed;
            }
            Err(_) => panic!("input {seed}"),
        }
    }
    // How many depends on how soon the queues run; that both kinds occurred does not.
    assert!(done > count / 64, "only {done} requests got through");
    assert!(malformed > count / 64, "only {malformed} were malformed");
}

#[test]
fn chains_that_are_nearly_right_are_survived() {
    let mut requests = 0;
    for seed in 0..INPUTS * 2 {
        let mut random = Random(seed);
        let mut image = image(&mut random);
        image.truncate(image.len() - usize::from(random.byte()));
        requests += survive_chains(&image);
    }
    assert!(requests > 1000, "only {requests} requests");
    survive_chains(&[]);
    survive_chains(&[0xff; 70_000]);
}
