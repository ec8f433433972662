use super::*;
use crate::sector::CipherName;
use mica_rt::{Backend, Executor, join_all};
use mica_store::MemoryStore;
use mica_units::next_random;

fn cipher() -> Arc<SectorCipher> {
    Arc::new(CipherName::XTS.with_key(&[7; 64]).expect("a key of this length"))
}

fn memory(bytes: Vec<u8>) -> Arc<dyn Store> {
    Arc::new(MemoryStore::new_writable("memory", bytes))
}

fn run(work: impl AsyncFnOnce()) {
    Executor::new(Backend::Sim { seed: 1 }).expect("an executor").block_on(work());
}

#[test]
fn sectors_are_encrypted_by_their_numbers_from_where_they_begin() {
    run(async || {
        let inner = memory(Vec::new());
        let store = CryptStore::from(Arc::clone(&inner), cipher(), HostOffset::new(1024));
        let plain: Vec<u8> = (0..=255).cycle().take(1024).collect();
        mica_block::write_all(&store, Buf::from_slice(&plain), HostOffset::new(512))
            .await
            .expect("written");
        assert_eq!(store.len().expect("known"), 1536);
        let sealed = read_exact(&*inner, HostOffset::new(1536), 1024).await.expect("read");
        let mut wanted = plain.clone();
        cipher().encrypt(1, &mut wanted);
        assert_eq!(sealed[..], wanted[..]);
        let read = read_exact(&store, HostOffset::new(512), 1024).await.expect("read");
        assert_eq!(read[..], plain[..]);
    });
}

#[test]
fn bytes_beyond_the_end_are_zeros_and_holes_are_not() {
    run(async || {
        let inner = memory(vec![0; 1024]);
        let store = CryptStore::new(Arc::clone(&inner), cipher());
        let read = read_exact(&store, HostOffset::new(0), 4096).await.expect("read");
        assert!(read[..1024].iter().any(|byte| *byte != 0), "what decryption makes of zeros");
        assert!(read[1024..].iter().all(|byte| *byte == 0));
        assert!(!store.reads_unwritten_as_zeros());
        assert_eq!(
            store.run_at(HostOffset::ZERO, 4096).expect("known"),
            Run { kind: RunKind::Data, len: 1024 }
        );
        assert_eq!(store.run_at(HostOffset::new(1024), 9).expect("known").kind, RunKind::Hole);
        for change in [Space::Punch, Space::Zero] {
            let refused = store.space(change, HostOffset::ZERO, 512).await.expect_err("refused");
            assert_eq!(refused.kind(), ErrorKind::Unsupported);
        }
    });
}

#[test]
fn memory_of_another_program_gets_plain_bytes_and_is_not_changed_by_writes() {
    run(async || {
        let inner = memory(Vec::new());
        let store = CryptStore::new(Arc::clone(&inner), cipher());
        let foreign = Buf::from_slice(&[9; 2048]).into_foreign();
        let (result, foreign) = store.write_at(foreign, HostOffset::ZERO).await;
        result.expect("written");
        assert_eq!(foreign[..], [9; 2048]);
        let into = Buf::zeroed(700).into_foreign();
        let (result, into) = store.read_at(into, HostOffset::new(100)).await;
        result.expect("read");
        assert_eq!(into[..], [9; 700]);
    });
}

/// Random writes of any length at any place, several at a time that do not overlap, against bytes
/// in memory.
#[test]
fn writes_of_parts_of_sectors_lose_nothing_beside_them() {
    const LEN: u64 = 16 << 10;
    for seed in 0..20 {
        run(async || {
            let mut state = seed;
            let mut below = |bound: u64| next_random(&mut state) % bound;
            let store = CryptStore::new(memory(Vec::new()), cipher());
            let mut model = vec![0; usize::try_from(LEN).expect("short")];
            mica_block::write_all(&store, Buf::zeroed(model.len()), HostOffset::ZERO)
                .await
                .expect("written");
            for round in 0..40_u8 {
                let mut writes = Vec::new();
                let mut at = below(600);
                while at < LEN {
                    let len = (1 + below(900)).min(LEN - at);
                    let range = usize::try_from(at).expect("short")
                        ..usize::try_from(at + len).expect("short");
                    model[range].fill(round);
                    let bytes = vec![round; usize::try_from(len).expect("short")];
                    let bytes = Buf::from_slice(&bytes);
                    writes.push(store.write_at(bytes, HostOffset::new(at)));
                    at += len + below(700) * below(2);
                }
                for (result, _) in join_all(writes).await {
                    result.expect("written");
                }
                let from = below(LEN);
                let len = usize::try_from(LEN - from).expect("short");
                let read = read_exact(&store, HostOffset::new(from), len).await.expect("read");
                let from = usize::try_from(from).expect("short");
                assert!(read[..] == model[from..], "seed {seed}, round {round}");
            }
        });
    }
}
