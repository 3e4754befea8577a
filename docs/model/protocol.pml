/*
 * Tokenyard's protocol for Spin: what can happen to requests when any party dies, stalls or repeats
 * itself between any two steps. README.md beside this file says what is left out, and why.
 *
 * A step is an `atomic` block, because a Lua script is. Each names its file in tokenyard/scripts/lua in a
 * comment, `-- <name>.lua`. Calls that are refused and change nothing for anybody are no steps,
 * except where the caller learns something. So a coordinator may act on a view as old as it likes:
 * it may try any entry with any lane, and what remains are the tries that the scripts let through.
 *
 * Broken variants, each of which Spin must catch:
 *   -DNO_FENCE    finish compares neither lease nor (worker, attempt)
 *   -DNO_SEQ      emit does not compare seq with the number of published tokens
 *   -DTWO_STEP    dispatch is two steps: add to the lane; then ledger and intake
 *   -DHASTY       a worker finishes although its last emit has not been answered
 *   -DNO_DEDUPE   dispatch and answer take an entry whatever the ledger knows of its id
 *   -DNO_TOKENS   a request goes back to the intake without the tokens that were published
 *   -DNO_SEARCH   nobody looks for requests whose entry a stranger has deleted
 *   -DTWO_LOOKS   reconcile trusts a look at the ledger and a later one at the streams
 *   -DOLD_PLACE   transfer leaves the ledger of what it moves as it is
 * -DNO_EPOCH: the leader's scripts do not compare the token. Not broken by that: see README.md.
 * -DSOUND_ENGINES: nothing is handed back, so that a worker loses a request only with its lease.
 * -DBY_READERS: judges by what readers see alone: results and tokens, whoever sent them
 */

#ifndef REQUESTS
#define REQUESTS 1      /* 1 or 2 ids, each with a client of its own */
#endif
#ifndef ADDS
#define ADDS 2          /* times that a client sends one id */
#endif
#ifndef TOKENS
#define TOKENS 2        /* tokens of a whole answer */
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 3      /* at most, of one request */
#endif
#ifndef INCARNATIONS
#define INCARNATIONS 3  /* workers that ever join: two, and one again */
#endif
#ifndef FAULTS
#define FAULTS 2        /* of workers; one incarnation is always left */
#endif
#ifndef TRIMS
#define TRIMS 0         /* entries that a stranger deletes from intakes or lanes */
#endif
#ifndef MOVES
#define MOVES 0         /* ADDS, where the leader moves a client's entries to its tenant's intake */
#endif
#ifndef TERMS
#define TERMS 2         /* of leadership; nobody interrupts the last */
#endif
#ifndef ROOM
#define ROOM 2          /* entries on a lane, at most */
#endif

/* Of one id in the intakes: the client's, then retries, then the client's in its tenant's intake */
#define ENTRIES (ADDS + ATTEMPTS + MOVES)
#define RETRY(attempt) (ADDS + attempt - 1) /* one retry entry at most comes of one attempt */
#define MOVED(e) (ADDS + ATTEMPTS + e)
#define is_clients(e) (e < ADDS || e >= ADDS + ATTEMPTS)
#define NOBODY INCARNATIONS
#define SAY printf
#define PROMISE(said, holds) if :: (holds) :: else -> SAY(said); assert(false) fi

#if REQUESTS == 1
#define SOME_REQUEST(is) (is(0))
#define PICK_REQUEST(r, is) r = 0
#else
#define SOME_REQUEST(is) (is(0) || is(1))
#define PICK_REQUEST(r, is) if :: is(0) -> r = 0 :: is(1) -> r = 1 fi
#endif

#if INCARNATIONS == 2
#define SOME_WORKER(is) (is(0) || is(1))
#define PICK_WORKER(w, is) if :: is(0) -> w = 0 :: is(1) -> w = 1 fi
#else
#define SOME_WORKER(is) (is(0) || is(1) || is(2))
#define PICK_WORKER(w, is) if :: is(0) -> w = 0 :: is(1) -> w = 1 :: is(2) -> w = 2 fi
#endif

mtype:state = { unknown, waiting, assigned, completed, failed, cancelled };
mtype:lease = { absent, held, ended };

typedef Request {
  bit intake[ENTRIES];   /* which of its entries lie in an intake */
  /* request:<client>/<id>, the ledger */
  mtype:state state = unknown;
  byte entry;            /* the intake entry that waits; the lane entry is (worker, attempt) */
  byte worker = NOBODY;
  byte attempt;
  byte tokens;           /* tokens:<client>/<id>: how many are published */
  byte carried;          /* field `published` of its retry or lane entry */
  /* What nobody in the yard sees, kept to judge by */
  bit accepted;          /* Redis has acknowledged a submission */
  bit begun;             /* a client's entry was dispatched or answered */
#if TRIMS
  bit trimmed;           /* a stranger has deleted the entry that its ledger names */
#endif
  byte results;          /* that readers have seen */
  byte seen;             /* tokens that readers have seen */
}

typedef Worker {
  mtype:lease lease = absent;
  bit over;              /* the lease's time has run out, and nobody has taken it yet */
  bit alive;             /* its process runs, and has not been told that it lost its lease */
  byte lane[REQUESTS];   /* attempt of the request's entry on the lane; 0: none */
  bit control[REQUESTS]; /* an entry on the lane that says: stop working on it */
}

#ifdef TWO_STEP
typedef Half {
  byte id; byte entry;
  byte lane = NOBODY;    /* of the worker to which it was added */
}
Half half[2];            /* of each coordinator: a dispatch between its two steps */
#endif

Request request[REQUESTS];
Worker worker[INCARNATIONS];
byte joined;             /* incarnations so far */
byte leader;             /* epoch of the leader; 0: the key has expired */
byte epoch;
byte token[2];           /* the leader token of each coordinator; 0: none. May be stale */
#if TRIMS
byte trims = TRIMS;      /* that a stranger may still do */
#endif
#ifdef TWO_LOOKS
bit looked[REQUESTS];    /* the leader has seen the ledger, with the state and entry below */
mtype:state seen_state[REQUESTS];
byte seen_at[REQUESTS];
#endif
byte faults = FAULTS;    /* that may still happen to workers */
bit calm;                /* from now on nobody dies, stalls, cancels or sends */
#ifdef SHORTEST          /* Spin searches breadth first only where nothing is hidden */
byte r, e, w;
#else
hidden byte r, e, w;     /* of one step: what it is about */
#endif

/* ------------------------------------------------------------------ questions that scripts ask */

#define is_over(r) (request[r].state == completed || request[r].state == failed || \
  request[r].state == cancelled)
#define has_lease(w) (worker[w].lease == held)
#ifdef NO_EPOCH
#define leads(me) (token[me] != 0)
#else
#define leads(me) (token[me] != 0 && token[me] == leader)
#endif

#if REQUESTS == 1
#define length(w) ((worker[w].lane[0] != 0) + worker[w].control[0])
#else
#define length(w) ((worker[w].lane[0] != 0) + worker[w].control[0] + \
  (worker[w].lane[1] != 0) + worker[w].control[1])
#endif

/* Whether the ledger knows the id as waiting at this very entry, or not at all. */
#ifdef NO_DEDUPE
#define is_the_one(r, e) (true)
#else
#define is_the_one(r, e) (request[r].state == unknown || \
  (request[r].state == waiting && request[r].entry == e))
#endif
#define fits(r, e) (request[r].intake[e] && is_the_one(r, e))
#define repeats(r, e) (request[r].intake[e] && !is_the_one(r, e))

#if ADDS + ATTEMPTS + MOVES == 6
#define SOME_ENTRY(is, r) (is(r, 0) || is(r, 1) || is(r, 2) || is(r, 3) || is(r, 4) || is(r, 5))
#define PICK_ENTRY(e, is, r) if :: is(r, 0) -> e = 0 :: is(r, 1) -> e = 1 \
  :: is(r, 2) -> e = 2 :: is(r, 3) -> e = 3 :: is(r, 4) -> e = 4 :: is(r, 5) -> e = 5 fi
#elif ADDS + ATTEMPTS + MOVES == 5
#define SOME_ENTRY(is, r) (is(r, 0) || is(r, 1) || is(r, 2) || is(r, 3) || is(r, 4))
#define PICK_ENTRY(e, is, r) if :: is(r, 0) -> e = 0 :: is(r, 1) -> e = 1 \
  :: is(r, 2) -> e = 2 :: is(r, 3) -> e = 3 :: is(r, 4) -> e = 4 fi
#elif ADDS + ATTEMPTS + MOVES == 4
#define SOME_ENTRY(is, r) (is(r, 0) || is(r, 1) || is(r, 2) || is(r, 3))
#define PICK_ENTRY(e, is, r) if :: is(r, 0) -> e = 0 :: is(r, 1) -> e = 1 \
  :: is(r, 2) -> e = 2 :: is(r, 3) -> e = 3 fi
#elif ADDS + ATTEMPTS + MOVES == 3
#define SOME_ENTRY(is, r) (is(r, 0) || is(r, 1) || is(r, 2))
#define PICK_ENTRY(e, is, r) if :: is(r, 0) -> e = 0 :: is(r, 1) -> e = 1 \
  :: is(r, 2) -> e = 2 fi
#endif

#define is_movable(r, e) (e < MOVES && request[r].intake[e])
#define may_transfer(r) (SOME_ENTRY(is_movable, r))
#define waits(r, e) (request[r].intake[e])
#define has_repeats(r) (SOME_ENTRY(repeats, r))
#define has_room(w) (has_lease(w) && length(w) < ROOM)
#define may_move(r) (request[r].attempt < ATTEMPTS && SOME_ENTRY(fits, r))
/* Out of attempts; or it is invalid, or its deadline passes, which may come at any time. */
#define may_answer(r) ((request[r].attempt == ATTEMPTS || !calm) && SOME_ENTRY(fits, r))
#define is_takeable(w) (worker[w].lease == ended || (has_lease(w) && worker[w].over))

/* Whether the ledger names an entry that is not there. */
#define is_astray(r) ((request[r].state == waiting && !request[r].intake[request[r].entry]) || \
  (request[r].state == assigned && worker[request[r].worker].lane[r] != request[r].attempt))

/* Fence of emit, finish and hand_back, without the lease. */
#define owns(me, r, attempt_) (request[r].worker == me && request[r].attempt == attempt_)

/* -------------------------------------------------------------------------- what readers can see */

#if TRIMS
#define is_trimmed(r) (request[r].trimmed)
#else
#define is_trimmed(r) (false)
#endif

inline show_tokens(me, r, seq, count) {
#ifndef BY_READERS
  PROMISE("G2: published by a worker without a lease\n", has_lease(me));
  PROMISE("G2: published by an attempt that has the request no more\n",
    worker[me].lane[r] == runs[r] || is_trimmed(r));
#endif
  PROMISE("G3: a token was repeated\n", seq >= request[r].seen);
  PROMISE("G3: a token was skipped\n", seq <= request[r].seen);
  request[r].seen = seq + count
}

inline show_result(r, how) {
  PROMISE("G2: a second result\n", request[r].results == 0);
  request[r].results = 1;
  request[r].state = how;
  request[r].tokens = 0;
  request[r].carried = 0 /* goes with its entry */
}

inline begin(r, e) {
  if
  :: is_clients(e) ->
    PROMISE("G4: one id was taken for two requests\n", !request[r].begun);
    request[r].begun = 1
  :: else
  fi
}

/* A lane without entries is forgotten, once nobody may add to it. */
inline forget_if_empty(w) {
  if
  :: worker[w].lease == ended && length(w) == 0 ->
    worker[w].lease = absent;
    worker[w].over = 0
  :: else
  fi
}

/* An assigned request goes back to intake:retry. */
inline put_back(w, r) {
  worker[w].lane[r] = 0;
  request[r].state = waiting;
  request[r].worker = NOBODY;
  request[r].entry = RETRY(request[r].attempt);
  request[r].intake[RETRY(request[r].attempt)] = 1;
#ifdef NO_TOKENS
  request[r].carried = 0
#else
  request[r].carried = request[r].tokens
#endif
}

/* ------------------------------------------------------------------------------------- parties */

/* Sends one id several times, since it may never learn that it was heard; dies when it likes. */
proctype Client(byte id) {
  byte sent;
  bit asked;
end:
  do
  :: atomic { /* -- submit.lua */
      !calm && sent < ADDS ->
      if
      :: request[id].state == unknown ->
        SAY("client: submit %d, ACCEPTED\n", id);
        PROMISE("G4: accepted though it was begun\n", !request[id].begun);
        request[id].intake[sent] = 1;
        request[id].state = waiting;
        request[id].entry = sent;
        request[id].accepted = 1
      :: else -> SAY("client: submit %d, KNOWN\n", id)
      fi;
      sent++
    }
  :: atomic { /* A plain XADD: no script, no ledger */
      !calm && sent < ADDS ->
      SAY("client: XADD %d\n", id);
      request[id].intake[sent] = 1;
      request[id].accepted = 1;
      sent++
    }
  :: atomic { /* -- cancel.lua */
      !calm && !asked && !is_over(id) ->
      asked = 1;
      if
      :: request[id].state == waiting -> request[id].intake[request[id].entry] = 0
      :: request[id].state == assigned ->
        if
        :: worker[request[id].worker].lane[id] != 0 -> worker[request[id].worker].control[id] = 1
        :: else /* deleted by a stranger: its worker may be gone, and nobody would read this */
        fi;
        worker[request[id].worker].lane[id] = 0
      :: else /* a tombstone: what comes later is a repetition */
      fi;
      SAY("client: cancel %d\n", id);
      request[id].begun = 1;
      show_result(id, cancelled)
    }
  od
}

#ifdef TWO_STEP
#define is_idle (half[me].lane == NOBODY)
#else
#define is_idle (true)
#endif

#ifdef TWO_LOOKS
#define may_look(r) (!looked[r] && !is_over(r) && request[r].state != unknown)
#define is_missed(r) (looked[r] && !is_over(r) && \
  ((seen_state[r] == waiting && !request[r].intake[seen_at[r]]) || \
   (seen_state[r] == assigned && worker[seen_at[r]].lane[r] == 0)))
#endif

/* Both may believe that they lead. All that a coordinator knows is its token; the rest it reads. */
proctype Coordinator(byte me) {
end:
  do
  :: atomic { /* -- lead.lua */
      leader == 0 && epoch < TERMS && (epoch > 0 || me == 0) -> /* 0 is who leads first */
      epoch++;
      leader = epoch;
      token[me] = epoch;
      SAY("coordinator %d: lead, epoch %d\n", me, epoch)
    }
  :: atomic { /* -- resign.lua */
      leads(me) && !calm && epoch < TERMS ->
      leader = 0;
      token[me] = 0;
      SAY("coordinator %d: resign\n", me)
    }
  :: atomic { /* It learns from any script that it has a successor. */
      token[me] != 0 && token[me] != leader ->
      token[me] = 0;
      SAY("coordinator %d: NOT_LEADER\n", me)
    }
  :: atomic { /* It dies, and is started again. */
      !calm && token[me] != 0 && (token[me] != leader || epoch < TERMS) ->
      token[me] = 0;
#ifdef TWO_STEP
      half[me].lane = NOBODY;
#endif
      SAY("coordinator %d: dies\n", me)
    }

  :: atomic { /* -- dispatch.lua: DISPATCHED */
      leads(me) && is_idle && SOME_REQUEST(may_move) && SOME_WORKER(has_room) ->
      PICK_REQUEST(r, may_move);
      PICK_ENTRY(e, fits, r);
      PICK_WORKER(w, has_room);
      if
      :: is_clients(e) -> request[r].carried = 0 /* a client's own field `published` is dropped */
      :: else
      fi;
      worker[w].lane[r] = request[r].attempt + 1;
#ifdef TWO_STEP
      SAY("coordinator %d: adds %d to lane %d\n", me, r, w);
      half[me].id = r;
      half[me].entry = e;
      half[me].lane = w
    }
  :: atomic {
      leads(me) && half[me].lane != NOBODY ->
      r = half[me].id;
      e = half[me].entry;
      w = half[me].lane;
      half[me].lane = NOBODY;
#endif
      SAY("coordinator %d: dispatch %d to worker %d,", me, r, w);
      SAY(" attempt %d behind token %d\n", request[r].attempt + 1, request[r].carried);
      begin(r, e);
      request[r].attempt++;
      request[r].state = assigned;
      request[r].worker = w;
      request[r].entry = 0;
      request[r].intake[e] = 0
    }
#if MOVES
  :: atomic { /* -- transfer.lua: MOVED */
      leads(me) && SOME_REQUEST(may_transfer) ->
      PICK_REQUEST(r, may_transfer);
      PICK_ENTRY(e, is_movable, r);
      SAY("coordinator %d: moves an entry of %d to its tenant\n", me, r);
#ifndef OLD_PLACE
      if
      :: request[r].state == waiting && request[r].entry == e -> request[r].entry = MOVED(e)
      :: else
      fi;
#endif
      request[r].intake[e] = 0;
      request[r].intake[MOVED(e)] = 1
    }
#endif
  :: atomic { /* -- dispatch.lua, answer.lua: DUPLICATE */
      leads(me) && SOME_REQUEST(has_repeats) ->
      PICK_REQUEST(r, has_repeats);
      PICK_ENTRY(e, repeats, r);
      request[r].intake[e] = 0;
      SAY("coordinator %d: drops a repetition of %d\n", me, r)
    }
  :: atomic { /* -- answer.lua: ANSWERED */
      leads(me) && SOME_REQUEST(may_answer) ->
      PICK_REQUEST(r, may_answer);
      PICK_ENTRY(e, fits, r);
      SAY("coordinator %d: answers %d\n", me, r);
      begin(r, e);
      request[r].intake[e] = 0;
      request[r].entry = 0;
      show_result(r, failed)
    }

#if TRIMS && !defined(NO_SEARCH)
#ifdef TWO_LOOKS
  :: atomic { /* HMGET of the ledger, by a client of Redis */
      leads(me) && SOME_REQUEST(may_look) ->
      PICK_REQUEST(r, may_look);
      looked[r] = 1;
      seen_state[r] = request[r].state;
      seen_at[r] = (request[r].state == waiting -> request[r].entry : request[r].worker);
      SAY("coordinator %d: looks at the ledger of %d\n", me, r)
    }
  :: atomic { /* XRANGE of the stream that it named, and then the end */
      leads(me) && SOME_REQUEST(is_missed) ->
      PICK_REQUEST(r, is_missed);
      looked[r] = 0;
#else
  :: atomic { /* -- reconcile.lua: ENDED */
      leads(me) && SOME_REQUEST(is_astray) ->
      PICK_REQUEST(r, is_astray);
#endif
      SAY("coordinator %d: %d is nowhere and ends\n", me, r);
      if
      :: request[r].state == assigned && has_lease(request[r].worker) ->
        worker[request[r].worker].control[r] = 1
      :: else
      fi;
      request[r].begun = 1;
      request[r].entry = 0;
      show_result(r, failed)
    }
#endif

  :: atomic { /* -- rescue.lua: first without entries, then one by one */
      leads(me) && SOME_WORKER(is_takeable) ->
      PICK_WORKER(w, is_takeable);
      if
      :: has_lease(w) ->
        worker[w].lease = ended;
        SAY("coordinator %d: rescue ends lease %d\n", me, w)
      :: else ->
        if
        :: worker[w].lane[0] != 0 -> r = 0
        :: worker[w].control[0] -> r = 0
        :: length(w) == 0 -> r = 0
#if REQUESTS == 2
        :: worker[w].lane[1] != 0 -> r = 1
        :: worker[w].control[1] -> r = 1
#endif
        fi;
        worker[w].control[r] = 0;
        if
        :: worker[w].lane[r] != 0 && request[r].state == assigned &&
           owns(w, r, worker[w].lane[r]) ->
          put_back(w, r);
          SAY("coordinator %d: rescues %d from worker %d,", me, r, w);
          SAY(" %d tokens published\n", request[r].carried)
        :: else -> worker[w].lane[r] = 0
        fi
      fi;
      forget_if_empty(w)
    }
  od
}

#define is_unread(r) (runs[r] == 0 && worker[me].lane[r] != 0)
#ifdef HASTY
#define may_finish(r) (runs[r] != 0)
#else
#define may_finish(r) (runs[r] != 0 && !asks[r])
#endif
#define makes_tokens(r) (runs[r] != 0 && made[r] < TOKENS)
#define is_told_to_stop(r) (worker[me].control[r])
#ifdef SOUND_ENGINES
#define may_hand_back(r) (false)
#else
#define may_hand_back(r) (runs[r] != 0 && request[r].attempt < ATTEMPTS)
#endif
/* The last emit of a run reaches the server a second time, after its answer. */
#define echo_is_taken(r) (runs[r] != 0 && made[r] != 0 && has_lease(me) && \
  request[r].state == assigned && owns(me, r, runs[r]) && is_next(r, made[r] - 1))
#ifdef NO_SEQ
#define is_next(r, seq) (true)
#else
#define is_next(r, seq) (seq == request[r].tokens)
#endif

inline drop_run(r) {
  runs[r] = 0;
  made[r] = 0;
  asks[r] = 0
}

inline stop_process() {
  worker[me].alive = 0;
  drop_run(0);
#if REQUESTS == 2
  drop_run(1)
#endif
}

/* One incarnation. It acts on what it knows, until an answer tells it that its lease is lost; a
   new incarnation of the same name is another process here, so both may act at once. */
proctype Incarnation(byte me) {
  byte runs[REQUESTS]; /* the attempt that its engine runs; 0: none */
  byte made[REQUESTS]; /* tokens of it that it knows to be published */
  bit asks[REQUESTS];  /* its last emit has no answer yet, so it calls again before it goes on */

end_waits:
  atomic { /* -- register.lua; numbers are given in the order in which workers join */
    joined == me ->
    joined++;
    worker[me].lease = held;
    worker[me].alive = 1;
    SAY("worker %d: register\n", me)
  }
end:
  do
  :: atomic { /* XREAD of the lane: no script */
      worker[me].alive && SOME_REQUEST(is_unread) ->
      PICK_REQUEST(r, is_unread);
      runs[r] = worker[me].lane[r];
      made[r] = request[r].carried;
      SAY("worker %d: reads %d\n", me, r)
    }
  :: atomic { /* It obeys a cancel. */
      worker[me].alive && SOME_REQUEST(is_told_to_stop) ->
      PICK_REQUEST(r, is_told_to_stop);
      worker[me].control[r] = 0;
      drop_run(r);
      SAY("worker %d: drops %d, which was cancelled\n", me, r)
    }
  :: atomic { /* -- emit.lua: a token */
      worker[me].alive && SOME_REQUEST(makes_tokens) ->
      PICK_REQUEST(r, makes_tokens);
      SAY("worker %d: emit %d, seq %d,", me, r, made[r]);
      if
      :: !has_lease(me) ->
        SAY(" LEASE_LOST\n");
        stop_process()
      :: else ->
        if
        :: !owns(me, r, runs[r]) || request[r].state != assigned ->
          SAY(" STALE\n");
          drop_run(r)
        :: else ->
          if
#ifndef NO_SEQ
          :: made[r] + 1 <= request[r].tokens ->
            SAY(" REPEATED\n");
            made[r]++;
            asks[r] = 0
#endif
          :: is_next(r, made[r]) ->
            show_tokens(me, r, made[r], 1);
            request[r].tokens++;
            if
            :: true -> SAY(" PUBLISHED\n"); made[r]++; asks[r] = 0
            :: true -> SAY(" PUBLISHED, and the answer is lost\n"); asks[r] = 1
            fi
          :: else ->
            SAY(" STALE, tokens before it are missing\n");
            drop_run(r)
          fi
        fi
      fi
    }
  :: atomic { /* -- emit.lua: the same call arrives once more, late */
      SOME_REQUEST(echo_is_taken) ->
      PICK_REQUEST(r, echo_is_taken);
      SAY("worker %d: emit %d, seq %d, once more\n", me, r, made[r] - 1);
      show_tokens(me, r, made[r] - 1, 1);
      request[r].tokens++
    }
  :: atomic { /* -- finish.lua: whole, with the tokens not yet published, or failed */
      worker[me].alive && SOME_REQUEST(may_finish) ->
      PICK_REQUEST(r, may_finish);
      SAY("worker %d: finish %d, attempt %d,", me, r, runs[r]);
      if
#ifndef NO_FENCE
      :: !has_lease(me) ->
        SAY(" LEASE_LOST\n");
        stop_process()
      :: has_lease(me) && !owns(me, r, runs[r]) ->
        SAY(" STALE\n");
        if
        :: worker[me].lane[r] == runs[r] -> worker[me].lane[r] = 0
        :: else
        fi;
        drop_run(r)
      :: has_lease(me) && owns(me, r, runs[r]) && request[r].state != assigned ->
        SAY(" REPEATED\n");
        drop_run(r)
      :: has_lease(me) && owns(me, r, runs[r]) && request[r].state == assigned ->
#else
      :: is_over(r) ->
        SAY(" REPEATED\n");
        drop_run(r)
      :: !is_over(r) ->
#endif
        SAY(" FINISHED\n");
        if
        :: true -> show_tokens(me, r, made[r], TOKENS - made[r]); show_result(r, completed)
        :: true -> show_tokens(me, r, made[r], 0); show_result(r, failed)
        fi;
        worker[me].lane[r] = 0;
        if
        :: true -> drop_run(r)
        :: true -> SAY("  and the answer is lost\n")
        fi
      fi
    }
  :: atomic { /* -- hand_back.lua: an engine's fault that may pass */
      worker[me].alive && !calm && SOME_REQUEST(may_hand_back) ->
      PICK_REQUEST(r, may_hand_back);
      SAY("worker %d: hand_back %d,", me, r);
      if
      :: !has_lease(me) ->
        SAY(" LEASE_LOST\n");
        stop_process()
      :: has_lease(me) && (!owns(me, r, runs[r]) || request[r].state != assigned ||
           worker[me].lane[r] != runs[r]) ->
        SAY(" STALE\n");
        drop_run(r)
      :: else ->
        SAY(" done\n");
        put_back(me, r);
        if
        :: true -> drop_run(r)
        :: true -> SAY("  and the answer is lost\n")
        fi
      fi
    }
  :: atomic { /* -- renew.lua: HELD */
      worker[me].alive && has_lease(me) && worker[me].over ->
      worker[me].over = 0;
      SAY("worker %d: renew\n", me)
    }
  :: atomic { /* -- renew.lua: LOST */
      worker[me].alive && !has_lease(me) ->
      stop_process();
      SAY("worker %d: learns that it lost its lease\n", me)
    }
  :: atomic { /* It dies. */
      worker[me].alive && !calm && faults > 0 ->
      faults--;
      stop_process();
      SAY("worker %d: dies\n", me)
    }
  od
}

#if TRIMS
#define may_trim(r) (request[r].state == waiting || request[r].state == assigned || \
  (request[r].state == unknown && SOME_ENTRY(waits, r)))
/* XDEL or XTRIM by hand. What nobody has dispatched of a plain XADD leaves no trace: then nothing
   was accepted that anybody could know of. */
proctype Stranger() {
end:
  do
  :: atomic {
      !calm && trims > 0 && SOME_REQUEST(may_trim) ->
      PICK_REQUEST(r, may_trim);
      trims--;
      if
      :: SOME_ENTRY(waits, r) ->
        PICK_ENTRY(e, waits, r);
        request[r].intake[e] = 0;
        if
        :: request[r].state == waiting && request[r].entry == e -> request[r].trimmed = 1
        :: request[r].state == unknown && !SOME_ENTRY(waits, r) -> request[r].accepted = 0
        :: else
        fi
      :: request[r].state == assigned && worker[request[r].worker].lane[r] != 0 ->
        worker[request[r].worker].lane[r] = 0;
        request[r].trimmed = 1
      :: else
      fi;
      SAY("stranger: deletes an entry of %d\n", r)
    }
  od
}
#endif

/* Its children's deaths, and the end of those that it was told to stop. */
#define may_retire(w) (worker[w].lease != absent && (has_lease(w) || length(w) == 0) && \
  (!worker[w].alive || (!calm && faults > 0)))
proctype Controller() {
end:
  do
  :: atomic { /* -- retire.lua */
      SOME_WORKER(may_retire) ->
      PICK_WORKER(w, may_retire);
      if
      :: worker[w].alive -> faults--
      :: else
      fi;
      worker[w].lease = ended;
      forget_if_empty(w);
      SAY("controller: retire worker %d\n", w)
    }
  od
}

/* Leases end with time: of the dead certainly, of the living while faults may happen. */
#define may_run_out(w) (has_lease(w) && !worker[w].over && \
  (!worker[w].alive || (!calm && faults > 0)))
proctype Clock() {
end:
  do
  :: atomic {
      SOME_WORKER(may_run_out) ->
      PICK_WORKER(w, may_run_out);
      if
      :: worker[w].alive -> faults--
      :: else
      fi;
      worker[w].over = 1;
      SAY("clock: the lease of worker %d runs out\n", w)
    }
  :: atomic {
      leader != 0 && epoch < TERMS && (!calm || (token[0] != leader && token[1] != leader)) ->
      leader = 0;
      SAY("clock: the lease of the leader runs out\n")
    }
  :: atomic {
      !calm ->
      calm = 1;
      faults = 0; /* nobody looks any more: fewer states */
      SAY("from now on nothing goes wrong\n")
    }
  od
}

/* ------------------------------------------------------------------------------------ promises */

#define on(w, r) (worker[w].lane[r] != 0)
#if INCARNATIONS == 2
#define lanes(r) (on(0, r) + on(1, r))
#else
#define lanes(r) (on(0, r) + on(1, r) + on(2, r))
#endif

/* G1: each accepted request is in exactly one of intake, one lane, result. Entries in the intake
   that the ledger does not name are repetitions, which are dropped when they are read. */
#define is_in_one_place(r) ( \
  (request[r].state == unknown && lanes(r) == 0 && request[r].results == 0 && \
    (!request[r].accepted || SOME_ENTRY(waits, r))) || \
  (request[r].state == waiting && lanes(r) == 0 && request[r].results == 0 && \
    request[r].intake[request[r].entry]) || \
  (request[r].state == assigned && lanes(r) == 1 && request[r].results == 0 && \
    worker[request[r].worker].lane[r] == request[r].attempt && \
    worker[request[r].worker].lease != absent) || \
  (is_over(r) && lanes(r) == 0 && request[r].results == 1))
#ifdef BY_READERS
#define is_misplaced(r) (false)
#elif defined(TWO_STEP) /* The gap itself is forgiven, so that Spin has to show what a death in it does. */
#define is_misplaced(r) (half[0].lane == NOBODY && half[1].lane == NOBODY && !is_in_one_place(r))
#else
#define is_misplaced(r) (!is_in_one_place(r) && !(is_trimmed(r) && is_astray(r)))
#endif
#define is_settled(r) ((is_over(r) || !request[r].accepted) && !SOME_ENTRY(waits, r))
#define is_unsettled(r) (!is_settled(r))
#define is_left_over(w) (worker[w].lease == ended || length(w) != 0)

/* Looks after every step; and once more when nobody can do anything any more. */
proctype Judge() {
end:
  do
  :: atomic {
      SOME_REQUEST(is_misplaced) ->
      PROMISE("G1: a request is lost, or in two places\n", false)
    }
  :: atomic {
      timeout ->
      PROMISE("G1: all is quiet, and an accepted request has no result\n",
        !SOME_REQUEST(is_unsettled));
      PROMISE("G5: all is quiet, and something lies on a lane\n", !SOME_WORKER(is_left_over));
      break
    }
  od
}

init {
  atomic {
    run Judge();
    run Clock();
    run Controller();
#if TRIMS
    run Stranger();
#endif
    run Coordinator(0);
    run Coordinator(1);
    run Incarnation(0);
    run Incarnation(1);
#if INCARNATIONS == 3
    run Incarnation(2);
#endif
    run Client(0)
#if REQUESTS == 2
    ;
    run Client(1)
#endif
  }
}
