use super::*;
use crate::vhost_user::testing::{Guest, MIB};

/// Where the table of a test is, and an indirect one.
const TABLE: u64 = 0x1000;
const INNER: u64 = 0x2000;

type Entry = (u64, u32, u16, u16);

fn put(guest: &Guest, table: u64, entries: &[Entry]) {
    for (place, (addr, len, flags, next)) in (0..).zip(entries) {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        guest.put(table + place * 16, &bytes);
    }
}

/// Reads the chain at `head` of a table of eight, with `inner` as indirect table.
fn read_from(head: u16, outer: &[Entry], inner: &[Entry]) -> Result<Chain, Malformed> {
    let guest = Guest::new(&[MIB]);
    put(&guest, TABLE, outer);
    put(&guest, INNER, inner);
    let mut chain = Chain::default();
    let table = Table { at: GuestAddress(TABLE), entries: 8 };
    chain.read(&guest.memory.guest, table, head).map(|()| chain)
}

fn read(outer: &[Entry]) -> Result<Chain, Malformed> {
    read_from(0, outer, &[])
}

fn pieces(of: &[(u64, u32)]) -> Vec<Piece> {
    of.iter().map(|(at, len)| Piece { at: GuestAddress(*at), len: *len }).collect()
}

#[test]
fn chain_is_what_may_be_read_and_what_may_be_written() {
    let chain = read_from(
        3,
        &[(0x300, 9, WRITE, 0), (0x200, 7, NEXT | WRITE, 0), (0, 0, 0, 0), (0x100, 5, NEXT, 1)],
        &[],
    );
    let chain = chain.expect("a chain");
    assert_eq!(chain.readable, pieces(&[(0x100, 5)]));
    assert_eq!(chain.writable, pieces(&[(0x200, 7), (0x300, 9)]));
}

#[test]
fn pieces_that_touch_are_one_and_empty_ones_none() {
    let chain = read(&[
        (0x100, 5, NEXT, 1),
        (0x777, 0, NEXT, 2),
        (0x105, 3, NEXT, 3),
        (0x108, 2, NEXT | WRITE, 4),
        (u64::MAX, 0, WRITE, 0),
    ]);
    let chain = chain.expect("a chain");
    assert_eq!(chain.readable, pieces(&[(0x100, 8)]));
    assert_eq!(chain.writable, pieces(&[(0x108, 2)]));
}

/// An empty writable descriptor does not count as a writable byte.
#[test]
fn order_is_that_of_bytes() {
    assert_eq!(read(&[(0, 1, NEXT | WRITE, 1), (0, 1, 0, 0)]).err(), Some(Malformed::Order));
    assert!(read(&[(0, 0, NEXT | WRITE, 1), (0, 1, 0, 0)]).is_ok());
}

#[test]
fn loops_and_numbers_beyond_the_table_are_found() {
    assert_eq!(read(&[(0, 1, NEXT, 0)]).err(), Some(Malformed::TooLong));
    assert_eq!(read(&[(0, 1, NEXT, 1), (0, 1, NEXT, 0)]).err(), Some(Malformed::TooLong));
    assert_eq!(read(&[(0, 0, NEXT, 0)]).err(), Some(Malformed::TooLong));
    assert_eq!(read(&[(0, 1, NEXT, 8)]).err(), Some(Malformed::BeyondTable));
    assert_eq!(read(&[(0, 1, NEXT, u16::MAX)]).err(), Some(Malformed::BeyondTable));
    assert_eq!(read_from(8, &[], &[]).err(), Some(Malformed::BeyondTable));
}

#[test]
fn indirect_tables_are_read_and_bounded() {
    let inner = [(0x100, 4, NEXT, 2), (0, 1, 0, 0), (0x200, 4, WRITE, 0)];
    let chain = read_from(0, &[(INNER, 48, INDIRECT, 0)], &inner).expect("a chain");
    assert_eq!(chain.readable, pieces(&[(0x100, 4)]));
    assert_eq!(chain.writable, pieces(&[(0x200, 4)]));
    // It may end a chain that began in the ring's own table.
    let outer = [(0x500, 4, NEXT, 1), (INNER, 48, INDIRECT, 0)];
    let chain = read_from(0, &outer, &inner).expect("a chain");
    assert_eq!(chain.readable, pieces(&[(0x500, 4), (0x100, 4)]));
    // WRITE says nothing of an indirect descriptor (virtio 1.3, section 2.7.5.3.2).
    assert!(read_from(0, &[(INNER, 48, INDIRECT | WRITE, 0)], &inner).is_ok());
    let refused = |outer: Entry, inner: &[Entry]| read_from(0, &[outer], inner).err();
    assert_eq!(refused((INNER, 32, INDIRECT, 0), &inner), Some(Malformed::BeyondTable));
    assert_eq!(refused((INNER, 48, INDIRECT | NEXT, 0), &inner), Some(Malformed::Indirect));
    assert_eq!(refused((INNER, 47, INDIRECT, 0), &inner), Some(Malformed::Indirect));
    assert_eq!(refused((INNER, 0, INDIRECT, 0), &inner), Some(Malformed::Indirect));
    let nested = [(INNER, 16, INDIRECT, 0)];
    assert_eq!(refused((INNER, 16, INDIRECT, 0), &nested), Some(Malformed::Indirect));
    assert_eq!(refused((1 << 40, 16, INDIRECT, 0), &[]), Some(Malformed::NotMapped));
    assert_eq!(refused((u64::MAX - 8, 160, INDIRECT, 0), &[]), Some(Malformed::NotMapped));
    let looped = [(0, 1, NEXT, 0)];
    assert_eq!(refused((INNER, 0xffff_fff0, INDIRECT, 0), &looped), Some(Malformed::TooLong));
}

#[test]
fn chain_is_no_longer_than_a_driver_may_make_it() {
    let half = (0x100, 1 << 31, NEXT, 1);
    assert!(read(&[half, (0x100, 1 << 31, 0, 0)]).is_ok());
    let over = [half, (0x100, 1 << 31, NEXT, 2), (0x100, 1, 0, 0)];
    assert_eq!(read(&over).err(), Some(Malformed::TooLong));
    // Pieces that touch are not put together where 32 bits do not hold their length.
    let touching = [(0, 1 << 31, NEXT, 1), (1 << 31, 1 << 31, 0, 0)];
    assert_eq!(read(&touching).expect("a chain").readable.len(), 2);
}

#[test]
fn bytes_are_taken_across_pieces_and_regions() {
    let guest = Guest::new(&[4096, 4096]);
    guest.put(4090, b"abcdefghijkl");
    let mut left = pieces(&[(4090, 3), (4093, 8)]);
    let mut bytes = [0; 5];
    take_bytes(&guest.memory.guest, &mut left, &mut bytes).expect("there are eleven");
    assert_eq!(&bytes, b"abcde");
    assert_eq!(left, pieces(&[(4095, 6)]));
    assert_eq!(take_last(&mut left), Ok(GuestAddress(4100)));
    assert_eq!(left, pieces(&[(4095, 5)]));
    let mut bytes = [0; 6];
    let taken = take_bytes(&guest.memory.guest, &mut left, &mut bytes);
    assert_eq!(taken, Err(Malformed::TooShort));
    let mut far = pieces(&[(8190, 4)]);
    let taken = take_bytes(&guest.memory.guest, &mut far, &mut bytes[..3]);
    assert_eq!(taken, Err(Malformed::NotMapped));
    assert_eq!(take_last(&mut Vec::new()), Err(Malformed::TooShort));
    assert_eq!(take_last(&mut pieces(&[(u64::MAX, 2)])), Err(Malformed::NotMapped));
}
