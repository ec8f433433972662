use super::*;
use crate::discard::Discard;
use crate::nbd::contexts::{Context, Part};
use crate::nbd::export::Export;
use crate::nbd::limits::Limits;
use crate::nbd::protocol::option;
use crate::nbd::testing::{Client, PatternDisk, World, info_data, meta_data, simulated};
use mica_block::LocalFuture;
use mica_rt::{now, sleep, spawn};
use mica_units::GuestRange;

const LEN: u64 = 1 << 20;
const POLICY: u32 = 2;
const UNKNOWN: u32 = 6;

fn disk() -> PatternDisk {
    PatternDisk::data(LEN)
}

/// Another disk at the address of `world`.
fn another(world: &World, name: &str, connections_max: usize) -> (Seat, Arc<Entry>) {
    another_with(world, name, connections_max, Vec::new())
}

fn another_with(
    world: &World,
    name: &str,
    connections_max: usize,
    contexts: Vec<Arc<dyn Context>>,
) -> (Seat, Arc<Entry>) {
    let seat = world.exports.join(name).expect("a new name");
    (seat, entry_of(world, name, connections_max, contexts))
}

fn entry_of(
    world: &World,
    name: &str,
    connections_max: usize,
    contexts: Vec<Arc<dyn Context>>,
) -> Arc<Entry> {
    let export = Export {
        disk: Arc::new(PatternDisk::data(2 * LEN)),
        name: name.to_owned(),
        description: format!("of {name}"),
        discard: Discard::default(),
        edges: Arc::default(),
        contexts,
    };
    let limits = Limits { connections_max, ..Limits::default() };
    Arc::new(Entry::new(export, limits, 1, &world.pool))
}

async fn greeted(world: &World) -> Client {
    let mut client = world.connect();
    client.greet(3).await;
    client
}

/// The names in a list.
async fn listed(client: &mut Client) -> Vec<String> {
    client.option(option::LIST, &[]).await;
    let mut replies = client.option_replies(option::LIST).await;
    assert_eq!(replies.pop().expect("an end").0, 1);
    let name = |data: &[u8]| {
        let len = usize::from(data[3]);
        String::from_utf8_lossy(&data[4..4 + len]).into_owned()
    };
    replies.iter().map(|(_, data)| name(data)).collect()
}

/// The length of the export `name`, or the error and its text.
async fn info(client: &mut Client, name: &str) -> std::result::Result<u64, (u32, String)> {
    client.option(option::INFO, &info_data(name.as_bytes(), &[])).await;
    let replies = client.option_replies(option::INFO).await;
    let (kind, data) = &replies[0];
    match kind >> 31 {
        0 => Ok(u64::from_be_bytes(data[2..10].try_into().expect("eight"))),
        _ => Err((kind & 0xffff, String::from_utf8_lossy(data).into_owned())),
    }
}

#[test]
fn clients_choose_by_name_and_the_empty_name_is_of_a_disk_that_is_alone() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        assert_eq!(info(&mut client, "").await, Ok(LEN));
        let (seat, entry) = another(&world, "b", 9);
        seat.serves(&entry);
        assert_eq!(listed(&mut client).await, ["b", "disk"]);
        assert_eq!(info(&mut client, "b").await, Ok(2 * LEN));
        assert_eq!(info(&mut client, "disk").await, Ok(LEN));
        for (name, text) in [("", "no default"), ("c", "no export with that name")] {
            let (error, told) = info(&mut client, name).await.expect_err("not there");
            assert_eq!(error, UNKNOWN);
            assert!(told.contains(text) && told.contains("\"b\", \"disk\""), "{told}");
        }
        drop(seat);
        assert_eq!(info(&mut client, "").await, Ok(LEN));
        assert_eq!(listed(&mut client).await, ["disk"]);
        assert_eq!(Arc::strong_count(&entry), 1, "nobody holds what has left");
    });
}

#[test]
fn meta_context_is_of_the_export_for_which_it_was_selected() {
    simulated(disk, async |world| {
        let (seat, entry) = another(&world, "b", 9);
        seat.serves(&entry);
        for (chosen, has_status) in [("b", true), ("disk", false)] {
            let mut client = greeted(&world).await;
            client.option(option::STRUCTURED_REPLY, &[]).await;
            client.expect_ack(option::STRUCTURED_REPLY).await;
            client.option(option::SET_META_CONTEXT, &meta_data(b"b", &[b"base:allocation"])).await;
            assert_eq!(client.option_replies(option::SET_META_CONTEXT).await.len(), 2);
            client.option(option::GO, &info_data(chosen.as_bytes(), &[])).await;
            assert_eq!(client.option_replies(option::GO).await.len(), 2);
            // NBD_CMD_BLOCK_STATUS.
            client.request(0, 7, 1, 0, 512).await;
            let (kind, _) = client.chunks(1).await.remove(0);
            // NBD_REPLY_TYPE_BLOCK_STATUS, or an error.
            assert_eq!(kind == 5, has_status, "{chosen}: {kind}");
        }
        let mut client = greeted(&world).await;
        client.option(option::STRUCTURED_REPLY, &[]).await;
        client.expect_ack(option::STRUCTURED_REPLY).await;
        client.option(option::SET_META_CONTEXT, &meta_data(b"", &[b"base:allocation"])).await;
        assert_eq!(client.expect_error(option::SET_META_CONTEXT).await, UNKNOWN);
    });
}

/// The story: a disk was closed and served again without one of its contexts while a client was
/// between its choice of contexts and that of the export. The request for the one that was gone
/// made the server panic, or told of another one under its name.
#[test]
fn contexts_that_were_selected_of_an_export_that_ended_are_not_those_of_the_next() {
    simulated(disk, async |world| {
        let (seat, old) = another_with(&world, "b", 9, vec![Arc::new(Whole)]);
        seat.serves(&old);
        let mut client = greeted(&world).await;
        client.option(option::STRUCTURED_REPLY, &[]).await;
        client.expect_ack(option::STRUCTURED_REPLY).await;
        client.option(option::SET_META_CONTEXT, &meta_data(b"b", &[b"test:whole"])).await;
        assert_eq!(client.option_replies(option::SET_META_CONTEXT).await.len(), 2);
        seat.leaves(&old);
        assert_eq!(Arc::strong_count(&old), 1, "nobody holds what has left");
        drop(old);
        seat.serves(&entry_of(&world, "b", 9, Vec::new()));
        client.option(option::GO, &info_data(b"b", &[])).await;
        assert_eq!(client.option_replies(option::GO).await.len(), 2);
        client.request(0, 7, 1, 0, 512).await;
        let (kind, _) = client.chunks(1).await.remove(0);
        assert_eq!(kind, 1 << 15 | 1, "an error");
    });
}

/// The same holds for all of a disk.
struct Whole;

impl Context for Whole {
    fn name(&self) -> &'static str {
        "test:whole"
    }

    fn parts(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Part>>> {
        Box::pin(std::future::ready(Ok(vec![Part { len: range.len(), flags: 0 }])))
    }
}

#[test]
fn client_waits_for_an_export_that_is_about_to_be_served_and_learns_why_one_is_not() {
    simulated(disk, async |world| {
        let (seat, entry) = another(&world, "b", 9);
        let seat = Arc::new(seat);
        let mut client = greeted(&world).await;
        assert_eq!(info(&mut client, "disk").await, Ok(LEN), "others do not wait");
        let later = Arc::clone(&seat);
        spawn(async move {
            sleep(Duration::from_secs(3)).await;
            later.serves(&entry);
        });
        assert_eq!(info(&mut client, "b").await, Ok(2 * LEN));
        seat.mark_absent("it is drained");
        let (error, told) = info(&mut client, "b").await.expect_err("drained");
        assert_eq!((error, &*told), (UNKNOWN, "\"b\" is not served: it is drained"));
        assert_eq!(listed(&mut client).await, ["disk"]);
        seat.mark_opening();
        let (_, told) = info(&mut client, "b").await.expect_err("it never comes");
        assert!(told.contains("still being opened"), "{told}");
    });
}

/// The story: a list waited for every disk that was being opened, ten seconds for one that hung,
/// and left it out then.
#[test]
fn list_waits_for_nothing_and_names_what_is_about_to_be_served() {
    simulated(disk, async |world| {
        let (_hanging, _) = another(&world, "b", 9);
        let (drained, _) = another(&world, "c", 9);
        drained.mark_absent("it is drained");
        let mut client = greeted(&world).await;
        let begin = now();
        assert_eq!(listed(&mut client).await, ["b", "disk"]);
        assert_eq!(now(), begin, "at once");
    });
}

/// The story: a client that asks for the details of each export waited ten seconds for each that
/// hung, and its handshake's deadline passed before it came to those that were served.
#[test]
fn client_that_asks_for_many_exports_that_hang_waits_once() {
    simulated(disk, async |world| {
        let hanging: Vec<_> =
            (0..9).map(|number| another(&world, &format!("b{number}"), 9)).collect();
        let mut client = greeted(&world).await;
        for (seat, _) in &hanging {
            let (_, told) = info(&mut client, seat.name()).await.expect_err("it never comes");
            assert!(told.contains("still being opened"), "{told}");
        }
        assert_eq!(info(&mut client, "disk").await, Ok(LEN));
    });
}

#[test]
fn full_export_refuses_a_client_which_may_choose_another() {
    simulated(disk, async |world| {
        let (seat, entry) = another(&world, "b", 1);
        seat.serves(&entry);
        let mut first = greeted(&world).await;
        first.option(option::GO, &info_data(b"b", &[])).await;
        assert_eq!(first.option_replies(option::GO).await.len(), 2);
        let mut second = greeted(&world).await;
        second.option(option::GO, &info_data(b"b", &[])).await;
        assert_eq!(second.expect_error(option::GO).await, POLICY);
        assert_eq!(entry.counters().connections_refused, 1);
        second.option(option::GO, &info_data(b"disk", &[])).await;
        assert_eq!(second.option_replies(option::GO).await.len(), 2);
        assert_eq!((entry.clients(), entry.counters().sessions), (1, 1));
    });
}

#[test]
fn stopped_export_takes_no_client_that_found_it_before() {
    simulated(disk, async |world| {
        let (seat, entry) = another(&world, "b", 9);
        seat.serves(&entry);
        let Found::Served(found) = world.exports.find(b"b", &mut Patience::default()).await else {
            panic!("it is there")
        };
        seat.leaves(&entry);
        entry.stop_and_wait();
        assert!(found.admit().is_none());
    });
}

#[test]
fn list_of_thousands_is_made_a_page_at_a_time() {
    simulated(disk, async |world| {
        let names: Vec<_> = (0..3000).map(|number| format!("n{number:05}")).collect();
        let seats: Vec<_> = names.iter().map(|name| another(&world, name, 1)).collect();
        for (index, (seat, entry)) in seats.iter().enumerate() {
            match index % 3 {
                0 => seat.mark_absent("it is drained"),
                _ => seat.serves(entry),
            }
        }
        let mut expected = vec!["disk".to_owned()];
        expected
            .extend(names.iter().enumerate().filter(|(at, _)| at % 3 != 0).map(|(_, n)| n.clone()));
        let mut client = greeted(&world).await;
        assert_eq!(listed(&mut client).await, expected);
        let page = world.exports.page(Some("n01000"), 4);
        let names: Vec<_> = page.exports.iter().map(Listed::name).collect();
        assert_eq!(names, ["n01001", "n01003", "n01004"]);
        assert_eq!(page.last.as_deref(), Some("n01004"));
        let (_, told) = info(&mut client, "x").await.expect_err("not there");
        assert!(
            told.contains("\"n00000\"") && told.contains(" more") && told.len() < 256,
            "{told}"
        );
    });
}

#[test]
fn clients_are_let_in_while_a_disk_is_served_and_nothing_holds_them_back() {
    simulated(disk, async |world| {
        let exports = &world.exports;
        let first = exports.opened().await;
        exports.hold_back();
        assert!(first.is_raised(), "those who have not chosen are dismissed");
        let later = async { timeout(Duration::from_secs(1), exports.opened()).await.is_ok() };
        assert!(!later.await);
        exports.let_in();
        let second = exports.opened().await;
        world.seat.mark_absent("it is drained");
        assert!(second.is_raised());
    });
}

#[test]
fn names_are_taken_once_and_are_free_when_a_seat_is_left() {
    let exports = Arc::<Exports>::default();
    let seat = exports.join("a").expect("free");
    assert_eq!(exports.join("a").expect_err("taken").kind(), ErrorKind::Invalid);
    assert_eq!(exports.join(&"n".repeat(4097)).expect_err("long").kind(), ErrorKind::Invalid);
    drop(seat);
    exports.join("a").expect("free again");
}

/// The story: clients that came to a shared address and named no export were counted for the disk
/// whose name was first.
#[test]
fn client_that_names_no_export_counts_for_one_that_is_alone_and_for_none_of_several() {
    simulated(disk, async |world| {
        let leaves = async || {
            let mut client = greeted(&world).await;
            client.option(option::ABORT, &[]).await;
            client.expect_ack(option::ABORT).await;
            world.until_open(0).await;
        };
        leaves().await;
        assert_eq!(world.counters().connections, 1, "it can only mean this one");
        let (seat, entry) = another(&world, "b", 9);
        seat.serves(&entry);
        leaves().await;
        assert_eq!((world.counters().connections, entry.counters().connections), (1, 0));
        // Whichever of them is not served.
        seat.mark_absent("it is drained");
        leaves().await;
        assert_eq!(world.counters().connections, 1);
        let mut names_it = greeted(&world).await;
        names_it.option(option::GO, &info_data(b"disk", &[])).await;
        assert_eq!(names_it.option_replies(option::GO).await.len(), 2);
        assert_eq!(world.counters().connections, 2);
    });
}
