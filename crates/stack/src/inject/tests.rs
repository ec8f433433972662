use super::*;

fn fault(text: &str) -> Fault {
    text.parse().expect(text)
}

#[test]
fn delays_are_understood() {
    for (text, micros) in [("delay=500us", 500), ("delay=2ms", 2000), ("delay=1s", 1_000_000)] {
        let Fault::Delay(options) = fault(text) else { panic!("{text}") };
        let time = Duration::from_micros(micros);
        assert_eq!(options, DelayOptions { operations: Operations::READS, time });
    }
    let Fault::Delay(options) = fault("delay=1s,op=sync+write") else { panic!() };
    let operations = Operations::from(Operation::Write).with(Operation::Sync);
    assert_eq!(options, DelayOptions { operations, time: Duration::from_secs(1) });
}

#[test]
fn errors_are_understood() {
    for (text, when, errno) in [
        ("error=1%", When::Rate { share: 0.01, seed: 0 }, Errno::IO),
        ("error=100%,errno=ENOSPC,seed=7", When::Rate { share: 1.0, seed: 7 }, Errno::NOSPC),
        ("error=every:100", When::Every(100), Errno::IO),
        ("error=every:1,errno=13", When::Every(1), Errno::ACCESS),
        ("error=range:1M-2G", When::Ranges(std::iter::once(1 << 20..2 << 30).collect()), Errno::IO),
    ] {
        let Fault::Error(options) = fault(text) else { panic!("{text}") };
        let (operations, errno) = (Operations::READS, errno.raw_os_error());
        assert_eq!(options, ErrorOptions { operations, when, errno }, "{text}");
    }
}

#[test]
fn errors_of_other_operations_are_understood() {
    for (text, operations, when) in [
        ("error=nth:3,op=sync", Operation::Sync.into(), When::Nth(3)),
        ("error=from:2,op=all", Operations::ALL, When::From(2)),
        ("error=from:2,op=set-len", Operation::SetLen.into(), When::From(2)),
        (
            "error=every:1,op=punch+zero+allocate",
            Operations::from(Operation::Punch).with(Operation::Zero).with(Operation::Allocate),
            When::Every(1),
        ),
    ] {
        let Fault::Error(options) = fault(text) else { panic!("{text}") };
        let errno = Errno::IO.raw_os_error();
        assert_eq!(options, ErrorOptions { operations, when, errno }, "{text}");
    }
}

#[test]
fn limit_of_the_memory_of_redo_logs_is_understood_and_leaves_stores_alone() {
    let fault = fault("redo-memory=64K");
    assert!(matches!(fault, Fault::RedoMemory(65536)));
    let store: Arc<dyn Store> = Arc::new(mica_store::MemoryStore::new("the image", Vec::new()));
    assert!(Arc::ptr_eq(&fault.stack_on(Arc::clone(&store)), &store));
}

#[test]
fn nonsense_is_refused_with_the_syntax() {
    for text in [
        "redo-memory",
        "redo-memory=15K",
        "redo-memory=1G",
        "",
        "delay",
        "delay=",
        "delay=5",
        "delay=5m",
        "delay=99999999999999999999s",
        "delay=-1s",
        "error=",
        "error=101%",
        "error=-1%",
        "error=NaN%",
        "error=every:0",
        "error=every:",
        "error=range:5-5",
        "error=range:5",
        "error=range:99999999T-1",
        "error=1%,errno=EWHAT",
        "error=1%,errno=0",
        "error=every:3,seed=1",
        "error=1%,seed",
        "noise=1",
        "delay=1s,",
        "delay=1s,op=",
        "delay=1s,op=reading",
        "error=nth:0",
        "error=from:",
        "error=nth:1,op=read+",
        "error=nth:1,op=all+read",
    ] {
        let error = text.parse::<Fault>().err().unwrap_or_else(|| panic!("{text} was accepted"));
        assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
        assert!(error.to_string().contains("delay=TIME"), "{error}");
    }
}

#[test]
fn log_goes_to_the_end_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    for line in ["one", "two"] {
        let Fault::Log(options) = fault(&format!("log={}", path.display())) else { panic!() };
        (options.sink)(line);
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
    assert!("log=/nowhere/at/all".parse::<Fault>().is_err());
}
