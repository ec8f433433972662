use super::super::{HEADER_BYTES, NewLuks, Wish, unlock};
use super::*;
use crate::{CipherName, Hash};
use mica_block::read_exact;
use mica_rt::{Backend, Executor};
use mica_store::MemoryStore;
use mica_units::next_random;
use zeroize::Zeroizing;

const AT: HostOffset = HostOffset::new(4096);
const FEW: NewSlot = NewSlot::Iterations(NonZeroU32::MIN);

fn passphrase(text: &str) -> Arc<Passphrase> {
    Arc::new(Passphrase::new("a test", Zeroizing::new(text.as_bytes().to_vec())))
}

fn run(work: impl AsyncFnOnce()) {
    Executor::new(Backend::Sim { seed: 1 }).expect("an executor").block_on(work());
}

/// A new header in memory.
fn made(wish: Wish, with: &str) -> (LuksHeader, MemoryStore) {
    let new = NewLuks::make(Wish { slot: FEW, ..wish }, &passphrase(with)).expect("made");
    let mut file = vec![0; 4096];
    file.extend_from_slice(new.bytes());
    (new.header().clone(), MemoryStore::new_writable("memory", file))
}

async fn header_in(store: &MemoryStore) -> LuksHeader {
    let bytes = read_exact(store, AT, HEADER_BYTES).await.expect("read");
    LuksHeader::decode(&bytes).expect("a header")
}

fn at(store: &MemoryStore) -> HeaderPlace<'_> {
    HeaderPlace { store, at: AT }
}

async fn opens(store: &MemoryStore, with: &str) -> Option<usize> {
    let header = header_in(store).await;
    let opened = unlock(&header, at(store), &passphrase(with)).await;
    opened.ok().map(|unlocked| unlocked.slot)
}

#[test]
fn new_header_is_decoded_and_opened_with_each_cipher_and_hash() {
    run(async || {
        for (cipher, aes_bits, hash) in [
            ("xts-plain64", 256, Hash::Sha256),
            ("xts-plain64", 128, Hash::Sha1),
            ("cbc-essiv:sha256", 128, Hash::Sha256),
            ("cbc-plain64", 192, Hash::Sha512),
            ("cbc-plain", 256, Hash::Sha384),
        ] {
            let cipher = CipherName::of_name(cipher).expect("known");
            let (header, store) = made(Wish { cipher, aes_bits, hash, slot: FEW }, "one");
            assert_eq!(header_in(&store).await, header, "what is encoded is decoded");
            let mut sealed = [5; 512];
            let opened = unlock(&header, at(&store), &passphrase("one")).await.expect("opened");
            opened.cipher.encrypt(3, &mut sealed);
            drop(opened);
            // Nothing is remembered any more.
            let opened = unlock(&header, at(&store), &passphrase("one")).await.expect("opened");
            opened.cipher.decrypt(3, &mut sealed);
            assert_eq!(sealed, [5; 512]);
            let refused = unlock(&header, at(&store), &passphrase("two")).await;
            let refused = refused.err().expect("refused");
            assert_eq!(
                refused.to_string(),
                "the passphrase in a test does not open its only active key slot"
            );
            assert_eq!(refused.kind(), ErrorKind::Denied);
        }
    });
}

#[test]
fn keys_are_added_and_removed_and_the_last_one_stays() {
    run(async || {
        let (mut header, store) = made(Wish::default(), "one");
        let (one, two) = (passphrase("one"), passphrase("two"));
        let place = at(&store);
        let refused = add_key(&mut header, place, &two, (&two, None, FEW)).await;
        assert_eq!(refused.expect_err("refused").kind(), ErrorKind::Denied);
        assert_eq!(add_key(&mut header, place, &one, (&two, None, FEW)).await.expect("added"), 1);
        assert_eq!(
            add_key(&mut header, place, &two, (&two, Some(7), FEW)).await.expect("added"),
            7
        );
        let refused = add_key(&mut header, place, &one, (&two, Some(7), FEW)).await;
        assert_eq!(refused.expect_err("in use").kind(), ErrorKind::Invalid);
        assert_eq!(header_in(&store).await, header);
        assert_eq!(opens(&store, "two").await, Some(1));
        let by_two = Slot::OpenedBy(Arc::clone(&two));
        assert_eq!(remove_keys(&mut header, place, &by_two, false).await.expect("removed"), 2);
        assert_eq!((opens(&store, "one").await, opens(&store, "two").await), (Some(0), None));
        for which in [Slot::Number(0), Slot::OpenedBy(Arc::clone(&one))] {
            let kept = remove_keys(&mut header, place, &which, false).await.expect_err("the last");
            assert_eq!(kept.kind(), ErrorKind::Denied);
            assert_eq!(opens(&store, "one").await, Some(0), "nothing has changed");
        }
        let by_two = remove_keys(&mut header, place, &by_two, false).await;
        assert_eq!(by_two.expect_err("it opens none").kind(), ErrorKind::Denied);
        let missing = remove_keys(&mut header, place, &Slot::Number(8), false).await;
        assert_eq!(missing.expect_err("no such slot").kind(), ErrorKind::Invalid);
        let gone = remove_keys(&mut header, place, &Slot::Number(0), true).await;
        assert_eq!(gone.expect("removed"), 1);
        assert_eq!(opens(&store, "one").await, None);
    });
}

/// What was active once, and written into the header again, is worth nothing: the material is gone.
#[test]
fn removed_key_does_not_come_back_with_its_slot() {
    run(async || {
        let (mut header, store) = made(Wish::default(), "one");
        let (one, two) = (passphrase("one"), passphrase("two"));
        let place = at(&store);
        add_key(&mut header, place, &one, (&two, None, FEW)).await.expect("added");
        let before = read_exact(&store, AT, HEADER_BYTES).await.expect("read");
        remove_keys(&mut header, place, &Slot::Number(0), false).await.expect("removed");
        mica_block::write_all(&store, before, AT).await.expect("written");
        assert_eq!(opens(&store, "two").await, Some(1));
        assert_eq!(opens(&store, "one").await, None);
    });
}

/// A power cut came after the slots were inactive: their material is still there.
#[test]
fn removal_that_was_interrupted_is_ended_by_the_number_of_the_slot() {
    run(async || {
        let (mut header, store) = made(Wish::default(), "one");
        let (one, two) = (passphrase("one"), passphrase("two"));
        let place = at(&store);
        add_key(&mut header, place, &one, (&two, None, FEW)).await.expect("added");
        let before = read_exact(&store, AT, HEADER_BYTES).await.expect("read");
        let (active, mut cut) = (header.clone(), header);
        cut.slots[1].iterations = None;
        mica_block::write_all(&store, Buf::from_slice(&cut.encode()), AT).await.expect("written");
        let mut header = header_in(&store).await;
        let again = remove_keys(&mut header, place, &Slot::Number(1), false).await;
        assert_eq!(again.expect("ended"), 0, "none was in use");
        assert_eq!(opens(&store, "one").await, Some(0), "the other key stays");
        // With the slot as it was, the passphrase opens nothing: the material is gone.
        mica_block::write_all(&store, before, AT).await.expect("written");
        assert_eq!(header_in(&store).await, active);
        assert_eq!(opens(&store, "two").await, None);
    });
}

/// Headers with random damage: decoding ends, and what it accepts has all in its place.
#[test]
fn damaged_headers_are_refused_or_sound() {
    let (header, _) = made(Wish::default(), "one");
    let mut accepted = 0;
    for seed in 0..4000 {
        let mut state = seed;
        let mut below =
            |bound: u64| usize::try_from(next_random(&mut state) % bound).expect("a small number");
        let mut bytes = header.encode().to_vec();
        for _ in 0..1 + below(3) {
            let at = below(HEADER_BYTES as u64);
            bytes[at] = u8::try_from(below(256)).expect("a byte");
        }
        bytes.truncate(if below(9) == 0 { below(HEADER_BYTES as u64) } else { HEADER_BYTES });
        let Ok(decoded) = LuksHeader::decode(&bytes) else { continue };
        accepted += 1;
        let mut again = LuksHeader::decode(&decoded.encode()).expect("what is encoded is decoded");
        // It may not be text.
        again.uuid.clone_from(&decoded.uuid);
        assert_eq!(again, decoded, "seed {seed}");
        let sectors = decoded.material_len() as u64 / SECTOR_BYTES;
        for slot in decoded.slots {
            let end = u64::from(slot.material_sectors) + sectors;
            assert!(end <= u64::from(decoded.payload_sectors), "seed {seed}");
        }
    }
    assert!(accepted > 100, "damage to salts and sums is not seen: {accepted}");
}

#[test]
fn what_mica_does_not_know_is_refused_by_name() {
    let (header, _) = made(Wish::default(), "one");
    let refused = |at: usize, with: &[u8]| {
        let mut bytes = header.encode();
        bytes[at..at + with.len()].copy_from_slice(with);
        LuksHeader::decode(&bytes).expect_err("refused").to_string()
    };
    assert!(refused(6, &[0, 2]).contains("LUKS version 2"));
    assert!(refused(8, b"serpent\0").contains("\"serpent\""));
    assert!(refused(40, b"ctr-plain64\0").contains("\"ctr-plain64\""));
    assert!(refused(72, b"ripemd160\0").contains("\"ripemd160\""));
    assert!(refused(0, b"SKUL").contains("no LUKS header"));
    // Half of all iterations that fit would be minutes of hashing.
    assert!(refused(212, &[0x7f]).contains("take too long"));
}

#[test]
fn iterations_of_all_slots_are_bounded_together() {
    let (mut header, _) = made(Wish::default(), "one");
    let most = NonZeroU32::new(1 << 27);
    header.slots[0].iterations = most;
    LuksHeader::decode(&header.encode()).expect("one may have that many");
    header.slots[5].iterations = most;
    let refused = LuksHeader::decode(&header.encode()).expect_err("two may not");
    assert_eq!(refused.kind(), ErrorKind::Limit);
    assert!(refused.to_string().contains("of all key slots"), "{refused}");
}

#[test]
fn nothing_of_a_key_is_shown() {
    let new = NewLuks::make(Wish { slot: FEW, ..Wish::default() }, &passphrase("hunter2"));
    let shown = format!("{:?} {:?}", new.expect("made"), passphrase("hunter2"));
    assert!(!shown.contains("hunter2"), "{shown}");
    let empty = NewLuks::make(Wish::default(), &passphrase("")).expect_err("refused");
    assert_eq!(empty.to_string(), "the passphrase in a test is empty");
}
