//! How fast a store in a directory is collected.

use super::*;
use mica_store::Handles;
use mica_store::object::DirectoryObjects;

/// Prints how much of a store is collected a second: of a disk that was written in sequence, and
/// then at random. Run it in release: `MICA_COLLECT_GIB` is how much is written each time.
#[test]
#[ignore = "writes gigabytes, and asserts nothing"]
fn speed_on_a_directory() {
    let gib: u64 =
        std::env::var("MICA_COLLECT_GIB").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let folder = tempfile::tempdir().expect("made");
    let objects = DirectoryObjects::open(folder.path(), &Handles::new(64)).expect("opened");
    let objects: Arc<dyn Objects> = Arc::new(objects);
    Executor::new(Backend::Pool).expect("threads").block_on(async {
        let volumes = volumes_in(Arc::clone(&objects), "host-1").await;
        let blocks = gib << 30 >> 12;
        volumes.create(&name("web"), blocks * BLOCK).await.expect("made");
        let mut rng = Rng::new(1);
        for how in ["in sequence", "at random"] {
            let volume = open(&volumes, "web").await;
            for number in 0..blocks {
                let block = if how == "at random" { rng.below(blocks) } else { number };
                write(&volume, block, 7).await;
            }
            volume.close().await.expect("closed");
            let volumes = volumes_in(Arc::clone(&objects), "collector").await;
            for dry_run in [true, false] {
                let start = mica_rt::now();
                let options = CollectOptions { dry_run, ..CollectOptions::default() };
                let collected = volumes.collect(options, &mut |_| ()).await.expect("collected");
                let took = mica_rt::now().saturating_since(start).as_secs_f64();
                println!(
                    "{how}, dry run {dry_run}: {:.2} GB in {took:.3} s, {:.2} GB/s; {} extents, \
                     {} nodes, {:.0} % live, {} freed, {} given back",
                    collected.bytes as f64 / 1e9,
                    collected.bytes as f64 / 1e9 / took,
                    collected.extents,
                    collected.nodes,
                    collected.live_bytes as f64 * 100.0 / collected.bytes as f64,
                    collected.freed_bytes,
                    collected.punched_bytes,
                );
            }
            let start = mica_rt::now();
            let found = volumes.scrub(Speed::default(), &mut |_| ()).await.expect("scrubbed");
            let took = mica_rt::now().saturating_since(start).as_secs_f64();
            println!("{how}: scrubbed {} blocks in {took:.2} s", found.blocks);
        }
    });
}
