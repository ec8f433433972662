use super::*;
use crate::place::Writer;
use mica_map::Reference;

const BUDGET: u64 = 96 << 20;
/// What the allocator may have taken besides: ends of its heaps, in huge pages.
const TOLERANCE: u64 = 4 << 20;
/// Set in the process that measures itself.
const MEASURES: &str = "MICA_TEST_CACHE_MEMORY";

fn place(number: usize) -> Place {
    let sequence = u32::try_from(number / 100_000).expect("small");
    let extent = ExtentId { writer: Writer::FIRST, sequence };
    Place::new(extent, Place::UNIT_BYTES * (256 + number % 100_000), 7)
}

/// One whose fourth child is what comes before it.
fn node(number: usize) -> Node {
    let mut bytes = Vec::from((1_u16 << 3).to_le_bytes());
    bytes.extend(place(number).to_bytes());
    Node::new(Directory::decode(&bytes, place(number + 1)).expect("a directory"))
}

/// What the system has given this process, to the page: what `status` says may be off by some pages
/// for each processor.
fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("readable");
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).expect("it says so");
    let number = line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
    number << 10
}

fn measure() -> u64 {
    let objects: Arc<dyn Objects> = Arc::new(crate::testing::memory());
    let before = memory();
    let tree = Tree::new(objects, BUDGET);
    let count = 3 * usize::try_from(BUDGET / NODE_BYTES).expect("small");
    for number in 0..count {
        tree.keep(place(number), node(number));
    }
    for number in 0..count {
        let key = number as u64;
        tree.shared.shortcuts.iter().for_each(|shortcuts| {
            let key = key << (4 * (u32::from(shortcuts.level()) + 1));
            shortcuts.keep(place(count), key, (place(number), node(number)));
        });
    }
    let stats = tree.stats();
    assert!(stats.cached_bytes <= stats.budget_bytes && stats.budget_bytes <= BUDGET);
    memory() - before
}

/// The story: a full cache took a tenth more than it was allowed to. It is measured in a process of
/// its own, in which nothing else takes memory.
#[test]
fn full_cache_takes_what_its_budget_allows() {
    if std::env::var_os(MEASURES).is_some() {
        let measured = measure();
        assert!(measured <= BUDGET + TOLERANCE, "{measured} bytes");
        // Nor is much of it left unused.
        assert!(measured >= BUDGET / 4 * 3, "{measured} bytes");
        return;
    }
    let own = std::env::current_exe().expect("a program");
    let mut alone = std::process::Command::new(own);
    alone.args(["--exact", "tree::tests::full_cache_takes_what_its_budget_allows"]);
    let ended = alone.env(MEASURES, "1").output().expect("started");
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && said.contains("1 passed"), "{said}");
}
