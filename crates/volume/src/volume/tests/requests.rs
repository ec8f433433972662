//! How many requests to the store a guest's read makes.

use super::*;

const LEN: u64 = 2 << 20;

/// Requests that a read of a whole disk makes once its map is known. The disk was written in one
/// piece.
async fn requests_of_a_read(objects: MemoryObjects) -> u64 {
    let only = Some(ObjectOperation::Read);
    let options = FaultyOptions { only, ..FaultyOptions::default() };
    let counted = Arc::new(FaultyObjects::new(Arc::new(objects), options));
    let store: Arc<dyn Objects> = counted.clone();
    let volumes = Volumes::open_or_make(store, environment("host-1"), 1 << 20).await;
    let volumes = volumes.expect("a store");
    volumes.create(&name("web"), LEN).await.expect("made");
    let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
    let written: Vec<u8> = (0..LEN).map(|at| u8::try_from(at % 251).expect("small")).collect();
    write(&volume, 0, &written).await.expect("written");
    volume.flush().await.expect("flushed");
    assert_eq!(read(&volume, 0, LEN).await, written);
    let before = counted.requests();
    assert_eq!(read(&volume, 0, LEN).await, written);
    counted.requests() - before
}

#[test]
fn far_stores_are_asked_for_much_at_a_time() {
    run(1, async {
        let far = requests_of_a_read(objects().with_latency(Duration::from_millis(2))).await;
        let near = requests_of_a_read(objects()).await;
        assert_eq!((far, near), (2, 8));
    });
}
