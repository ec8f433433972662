//! Bad days of a disk that is written: no space, sick storage, files that change under the server,
//! and tables that an enemy made. Guests get errors; the server lives, and what was good stays so.

mod write_faults {
    //! Faults of the storage, and faults in the image.
    mod image;
    mod storage;
    mod tables;
}
