//! Writes in flight together, which share groups of the log when they link in the same turn.

use crate::plain::{Plain, read, write};
use mica_block::Manage as _;
use mica_qcow2_tools::create::ImageWish;
use mica_rt::join_all;
use mica_sim::crash::Mode;
use mica_sim::scenario;

const CLUSTER: u64 = 65536;
const WRITES: u64 = 32;

#[test]
fn every_write_of_a_shared_group_outlives_its_process() {
    scenario(64, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 64 << 20).await;
        let chain = image.open(Mode::Write).await;
        let acknowledged = std::cell::RefCell::new(Vec::new());
        {
            let (world, chain, acknowledged) = (&world, &chain, &acknowledged);
            // Dies with one of the first changes: of the log, or of the file.
            world.kill_after(4 + world.random_below(3 * WRITES));
            let written = join_all((0..WRITES).map(|cluster| async move {
                let written = write(chain, cluster * CLUSTER, 7, 512).await;
                if written.is_ok() && world.cuts() == 0 {
                    acknowledged.borrow_mut().push(cluster);
                }
            }));
            written.await;
        }
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        for cluster in acknowledged.into_inner() {
            let shown = read(&chain, cluster * CLUSTER, 512).await.unwrap();
            assert_eq!(shown, [7; 512], "cluster {cluster} was acknowledged");
        }
        chain.close().await.unwrap();
        image.expect_uncorrupted("after a kill").await;
    });
}
